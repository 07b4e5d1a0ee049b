"""Run vllm-tuner (PyPI) on a case, as it is shipped or measuring with kvtune's load client.

    python -m venv tuner && tuner/bin/pip install "vllm-tuner[http]==0.1.6"
    python benchmarks/peer_vllm_tuner.py capacity --model MODEL --python tuner/bin/python

Its code is not changed. It starts servers with `vllm serve`, for which a command of that name is
put before the others that starts the same build of vLLM; servers start cold, as it has no other
way. As it has no limit of time, it gets Ctrl-C at the end of its time, and its best trial is what
its `export` would write. It knows no goal beyond its own metrics: as shipped it maximises tokens a
second, as in its own example, under its own client, which sends one prompt again and again. It is
asked for prompts of such a length that they have as many tokens as those of the case.

`--measure ours` replaces that client by kvtune's with the load of the case, and what it maximises
by requests a second that are within the goal's limits. Its search stays as it is.

Its parameters are those that kvtune has values for in this case; the pool is given. The first guess
that it makes of a model's numbers needs the model on a hub, so there is none here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from peer_case import Setting, cases
from peer_log import say
from peer_search import Found
from pydantic import JsonValue

from kvtune.engines.vllm.environment import added_environment, find_installation
from kvtune.engines.vllm.readiness import port_is_taken
from kvtune.errors import BadInput, KvtuneError

PORT = 8000
"""Where it starts servers; it cannot be told another."""

STUDY = "peer"
GRACE_S = 40.0
"""How long it may take from Ctrl-C to its result: it stops its server and draws a page."""

LOOK_S = 1.0
"""How often it is looked at what it has started."""

REPLAY_S = 12
"""How long its own client sends requests, about as long as a replay of kvtune's."""

LONGER = 2.23
"""Its prompts are random letters, four for each token it is asked for. SmolLM2 makes 2.2 tokens of
them, at any length from 100 to 3,600, so that many fewer are asked for."""

Measure = Literal["shipped", "ours"]


@dataclass(frozen=True, slots=True)
class Tuner:
    """Where vllm-tuner is, and with what it measures."""

    python: Path
    measure: Measure = "shipped"
    replay_s: int = REPLAY_S


def config_of(setting: Setting, tuner: Tuner, folder: Path) -> dict[str, Any]:
    """Its study of a case, in the words of its configuration."""
    case = setting.case
    metric = "output_tokens_per_sec" if tuner.measure == "shipped" else "throughput_req_per_sec"
    prompt_tokens = case.load.prefix_tokens + _mean(case.load.input_tokens)
    base = {name.replace("-", "_"): value for name, value in case.base_arguments.items()}
    return {
        "model": str(Path(setting.model).resolve()),
        "study": {"name": STUDY},
        "optimization": {
            "objectives": [{"metric": metric, "direction": "maximize"}],
            "sampler": "tpe",
            "n_trials": 1000,
        },
        "hardware": {"accelerator": "cpu"},
        "parameters": [
            {"name": "max_num_seqs", "min": 4, "max": 128, "step": 4},
            {"name": "max_num_batched_tokens", "min": 512, "max": 2048, "step": 256},
            {"name": "block_size", "options": ["32", "64", "128", "256"]},
            {"name": "kv_cache_dtype", "options": ["auto", "fp8"]},
        ],
        "constraints": [{"expression": "max_num_batched_tokens >= max_num_seqs"}],
        "static_parameters": base,
        "benchmark": {
            "provider": "http",
            "prompt_tokens": round(prompt_tokens / LONGER),
            "output_tokens": _mean(case.load.output_tokens),
            "max_seconds": tuner.replay_s,
            "concurrent_requests": case.concurrency,
        },
        "output": {"directory": str(folder), "reports": ["json"]},
    }


def arguments_of(best: dict[str, Any] | None) -> dict[str, JsonValue]:
    """Its best parameters as engine arguments; none where no trial of it has a value."""
    return {name.replace("_", "-"): _value(value) for name, value in (best or {}).items()}


def vllm_tuner(setting: Setting, tuner: Tuner, folder: Path, *, limit_s: float, seed: int) -> Found:
    """Tune a case for so long. `seed` draws the requests of our client; its sampler has no seed.

    Raises:
        BadInput: its port is taken, or it ended without a result.
    """
    if port_is_taken("127.0.0.1", PORT):
        raise BadInput(
            f"vllm-tuner serves on port {PORT}, which is taken", "Stop what listens there."
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder = folder.resolve()
    study, result = folder / "asked.json", folder / "result.json"
    study.write_text(
        json.dumps(
            {
                "config": config_of(setting, tuner, folder),
                "measure_with": _command(setting, seed) if tuner.measure == "ours" else None,
            }
        )
    )
    began_s = time.monotonic()
    with (folder / "output.log").open("w") as log:
        process = subprocess.Popen(
            [str(tuner.python.absolute()), str(_beside("peer_vllm_tuner_run.py")), study, result],
            env=_environment(setting, folder),
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _end_after(process, limit_s)
    wall_s = time.monotonic() - began_s
    if not result.exists():
        tail = (folder / "output.log").read_text()[-2000:]
        raise BadInput(f"vllm-tuner left no result: {tail}", f"See {folder}.")
    return found_of(json.loads(result.read_text()), wall_s, _trials(folder))


def found_of(result: dict[str, Any], wall_s: float, trials: Sequence[dict[str, Any]]) -> Found:
    """Its result as that of a tuner; its baseline is one launch more than it has trials."""
    failed = [trial for trial in trials if trial["status"] != "completed"]
    return Found(
        arguments=arguments_of(result["best"]),
        wall_s=wall_s,
        launches=result["trials"] + 1,
        failed_launches=sum("failed to start" in (one["error_message"] or "") for one in failed),
        says=f"{len(trials)} trials, {len(failed)} failed",
        details={"value": result["value"], "values": result["values"]},
    )


def _trials(folder: Path) -> list[dict[str, Any]]:
    """What it kept of each trial that it finished."""
    files = sorted((folder / "study_data" / STUDY).glob("trial_*.json"))
    return [json.loads(file.read_text()) for file in files]


def _end_after(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Let it run so long, then end it and what it started, whatever becomes of this process.

    What it started is looked at while it runs: once it has crashed, nobody knows its children.
    """
    until_s = time.monotonic() + limit_s
    theirs: set[psutil.Process] = set()
    try:
        while time.monotonic() < until_s and process.poll() is None:
            theirs |= _with_children(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
    finally:
        theirs |= _with_children(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        _, left = psutil.wait_procs(theirs, timeout=GRACE_S)
        for one in left:
            one.kill()
        process.wait()


def _with_children(pid: int) -> set[psutil.Process]:
    try:
        own = psutil.Process(pid)
        return {own, *own.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def _environment(setting: Setting, folder: Path) -> dict[str, str]:
    """Its environment: a `vllm` that starts our build, and what kvtune gives its servers too."""
    shim = folder / "bin" / "vllm"
    shim.parent.mkdir()
    found = find_installation(None)
    shim.write_text(f'#!/bin/sh\nshift\nexec {found.python} -m {found.module} --model "$@"\n')
    shim.chmod(0o755)
    added = added_environment(
        {}, platform=found.info.platform, model=str(Path(setting.model).resolve()), measured=True
    )
    path = os.pathsep.join([str(shim.parent), os.environ.get("PATH", "")])
    return {**os.environ, **added, "PATH": path}


def _command(setting: Setting, seed: int) -> list[str]:
    model = str(Path(setting.model).resolve())
    script = str(_beside("peer_load.py"))
    return [sys.executable, script, setting.case.name, "--model", model, "--seed", str(seed)]


def _beside(name: str) -> Path:
    return Path(__file__).resolve().with_name(name)


def _mean(lengths: str) -> int:
    """The mean of lengths as a case writes them: 32 or uniform:16-32."""
    ends = [int(end) for end in lengths.removeprefix("uniform:").split("-")]
    return round(sum(ends) / len(ends))


def _value(value: Any) -> JsonValue:
    """Its numbers are floats or texts, and its switches are texts."""
    if isinstance(value, float):
        return int(value) if value == int(value) else value
    words: dict[str, JsonValue] = {"true": True, "false": False}
    return int(value) if str(value).isdigit() else words.get(value, value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=sorted(cases()))
    parser.add_argument("--model", required=True, help="of SmolLM2-135M-Instruct")
    parser.add_argument("--python", type=Path, required=True, help="that has vllm-tuner")
    parser.add_argument("--measure", choices=("shipped", "ours"), default="shipped")
    parser.add_argument("--replay-s", type=int, default=REPLAY_S, help="of its own client")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for its output; by default none is kept")
    options = parser.parse_args()
    setting = Setting(cases()[options.case], options.model)
    tuner = Tuner(options.python, options.measure, options.replay_s)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.keep or Path(scratch) / "tuner"
            limit_s = options.minutes * 60
            found = vllm_tuner(setting, tuner, folder, limit_s=limit_s, seed=options.seed)
    except KvtuneError as error:
        raise SystemExit(f"{error.message}; {error.fix}") from error
    say(f"chosen: {found.settings}")
    sys.stdout.write(json.dumps(asdict(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
