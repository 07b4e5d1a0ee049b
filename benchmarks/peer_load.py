"""Send a case's load to a server that runs, and print the figures as JSON.

    python benchmarks/peer_load.py capacity --model MODEL --url http://127.0.0.1:8000 --seed 1

For tuners that can be given a command to measure with.
"""

from __future__ import annotations

import argparse
import json
import sys

from peer_case import Setting, cases, got_through

from kvtune.profilers.load import runtime
from kvtune.profilers.measure import replay_workload
from kvtune.profilers.metrics.base import measure
from kvtune.types import Endpoint


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=sorted(cases()))
    parser.add_argument("--model", required=True, help="the model as the server calls it")
    parser.add_argument("--url", required=True)
    parser.add_argument("--seed", type=int, required=True, help="of the requests")
    parser.add_argument("--salt", type=int, default=0, help="another one makes other prompts")
    options = parser.parse_args()
    setting = Setting(cases()[options.case], options.model)
    requests = setting.case.requests(options.seed)
    limit = setting.case.base_arguments["max-model-len"]
    run = runtime.run(
        replay_workload(
            Endpoint(options.url, options.model, None),
            requests,
            setting.plan(requests),
            salt=options.salt,
            max_model_len_tokens=limit if isinstance(limit, int) else None,
        )
    )
    if not got_through(run):
        raise SystemExit(f"requests failed: {run.warnings}")
    sys.stdout.write(json.dumps(measure(run, setting.case.limits)) + "\n")


if __name__ == "__main__":
    main()
