"""Runs inside the environment of vllm-tuner: one study of it, ended from outside by Ctrl-C.

    python peer_vllm_tuner_run.py STUDY.json RESULT.json

STUDY.json holds its own configuration under "config"; with "measure_with", a command that gets
`--url URL --salt N` and prints figures as JSON, its benchmark is replaced. Imports nothing of
kvtune.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    # Ctrl-C may have been switched off in what started this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from vllm_tuner.cli import main as tuner

    if measure_with := asked["measure_with"]:
        tuner._create_benchmark_provider = lambda config: measured_by(measure_with)
    config = Path(sys.argv[1]).with_suffix(".config.json")  # JSON is YAML too.
    config.write_text(json.dumps(asked["config"]))
    tuner.CLI().run(config=str(config))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(sys.argv[2]).write_text(json.dumps(result_of(asked["config"])))


def measured_by(command: list[str]) -> object:
    """A benchmark of its interface that runs a command. Only good requests count as throughput."""
    from vllm_tuner.benchmarks.base import BenchmarkProvider
    from vllm_tuner.core.models import BenchmarkResult

    class Command(BenchmarkProvider):
        name = "command"
        salts = count(1)

        def run(self, server_url: str, config: Any) -> BenchmarkResult:
            words = [*command, "--url", server_url, "--salt", str(next(self.salts))]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                self.last_error = done.stderr[-500:]
                return BenchmarkResult()
            found = json.loads(done.stdout)
            return BenchmarkResult(
                throughput_req_per_sec=found["goodput_requests_per_s"],
                output_tokens_per_sec=found.get("output_tokens_per_s", 0.0),
                p50_latency_ms=1000 * found["e2e_p50_s"],
                p95_latency_ms=1000 * found["e2e_p95_s"],
                p99_latency_ms=1000 * found["e2e_p99_s"],
                ttft_ms=1000 * found["ttft_p50_s"],
                itl_ms=1000 * found["itl_p50_s"],
                total_requests=config.concurrent_requests,
                successful_requests=config.concurrent_requests,
            )

        def supports_synthetic_workloads(self) -> bool:
            return True

        def supports_real_datasets(self) -> bool:
            return True

    return Command()


def result_of(config: dict[str, Any]) -> dict[str, Any]:
    """What it would export, and what came of its trials, from its own database."""
    import optuna

    storage = f"sqlite:///{config['output']['directory']}/study.db"
    try:
        study = optuna.load_study(study_name=config["study"]["name"], storage=storage)
    except KeyError:  # It was still at its baseline.
        return {"best": None, "value": None, "trials": 0, "values": []}
    done = [trial for trial in study.trials if trial.values]
    best = study.best_trial if done else None
    return {
        "best": best.params if best else None,
        "value": best.value if best else None,
        "trials": len(study.trials),
        "values": [trial.value for trial in done],
    }


if __name__ == "__main__":
    main()
