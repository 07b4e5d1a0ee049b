"""Import vLLM once and fork servers from here: a start then takes seconds, not half a minute.

Run by path under the engine's interpreter: `warm_parent.py CHANNEL_FD`, CPU platform only (a CUDA
context does not survive a fork). Over the channel, a Unix socket, it first says `{"ready": true}`
or `{"error": ...}`, then answers one JSON object a line:

- `{"do": "serve", "argv": [...], "grace_s": 10}` with two descriptors, a log and the far end of a
  guard's channel: forks a guard, which forks the server. Answers `{"guard": pid}`.
- `{"do": "check", "argument_lists": [...]}`: answers as `argument_check` does.

It ends when the channel does. Standard library and vLLM only.

A forked server must serve exactly as a started one. What a fresh interpreter would have taken from
its environment at load time is therefore made up for here: the preloaded libraries by running this
script under them, OpenMP's thread count and binding after the fork of a worker.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

_ENTRY = "vllm.entrypoints.launchers.api_server.entry"
# What the API server, the engine process and the worker import before they can serve.
_PRELOADED = (
    "vllm.entrypoints.launchers.cli_args",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "transformers",
    "uvicorn",
    "uvloop",
)
_PRELOAD_DONE = "KVTUNE_WARM_PARENT_PRELOADED"
_BINDINGS = ("GOMP_CPU_AFFINITY", "OMP_PLACES", "KMP_AFFINITY")


def _load_sibling(name: str) -> ModuleType:
    """Load a script next to this one; an import by name could shadow a module of vLLM's."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"kvtune_{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _preloads() -> list[str]:
    """Libraries that vLLM's CPU platform puts into LD_PRELOAD for the processes it starts."""
    current = os.environ.get("LD_PRELOAD", "")
    torch, vllm = importlib.util.find_spec("torch"), importlib.util.find_spec("vllm")
    openmp: list[Path] = []
    allocators: list[Path] = []
    if torch and torch.origin and not any(n in current for n in ("libomp", "libgomp", "libiomp")):
        home = Path(torch.origin).parent
        for folder in (home.parent / "torch.libs", home / "lib"):
            openmp += folder.glob("libgomp*.so*")
    if vllm and vllm.origin and "libtcmalloc" not in current:
        for pattern in ("libtcmalloc_minimal*.so*", "libtcmalloc.so*"):
            allocators += (Path(vllm.origin).parent / "libs").glob(pattern)
    return [str(path) for path in (*allocators[:1], *openmp[:1])]


def _run_under_preloads() -> None:
    """Start this script over with the libraries of `_preloads`, which only work from the start."""
    if os.environ.pop(_PRELOAD_DONE, None):
        return
    environment = {**os.environ, _PRELOAD_DONE: "1"}
    preloads = ":".join([*_preloads(), *filter(None, [os.environ.get("LD_PRELOAD")])])
    if preloads:
        environment["LD_PRELOAD"] = preloads
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def _keep_forking() -> None:
    """Undo the CPU platform's switch to spawned workers, which would import everything again."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(check_and_update_config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def _cpu_list(binding: str) -> list[int]:
    """The CPU numbers in an OpenMP binding such as `0 1`, `{0,1}` or `proclist=[0,1]`."""
    digits = binding.rpartition("[")[2] if "[" in binding else binding
    return [int(n) for n in "".join(c if c.isdigit() else " " for c in digits).split()]


def _threads() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/task").iterdir()}


def _bind_worker() -> None:
    """In the fork of a worker: give OpenMP the threads and CPUs that its environment asks for.

    vLLM sets these variables around the start of a worker, for a library that reads them when it
    is loaded; here it is loaded already.
    """
    binding = next((os.environ[n] for n in _BINDINGS if os.environ.get(n) != _at_start[n]), None)
    if binding is None:
        return
    import torch

    cpus, threads = _cpu_list(binding), int(os.environ["OMP_NUM_THREADS"])
    before = _threads()
    torch.set_num_threads(threads)
    if threads > 1:
        # The first parallel region creates the threads; large enough that each gets a share.
        torch.ones(threads << 16).add_(1)
    os.sched_setaffinity(0, cpus[:1])
    for index, thread in enumerate(sorted(_threads() - before)):
        os.sched_setaffinity(thread, {cpus[(index + 1) % len(cpus)]})


_at_start = {name: os.environ.get(name) for name in _BINDINGS}


def _import_vllm() -> ModuleType:
    entry = importlib.import_module(_ENTRY)
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(Exception):
        # The first /server_info of a process runs a second of commands; its children keep this.
        info = importlib.import_module("vllm.entrypoints.serve.dev.server_info.api_router")
        info._get_system_env_info_cached()
    import torch

    # A thread pool does not survive a fork; one thread never makes a pool.
    torch.set_num_threads(1)
    _keep_forking()
    os.register_at_fork(after_in_child=_bind_worker)
    gc.collect()
    gc.freeze()
    return entry


def _serve(entry: ModuleType, argv: list[str]) -> int:
    """Run vLLM's server in this process as its own interpreter would; return the exit code."""
    sys.argv = ["api_server", *argv]
    code = 0
    try:
        entry.main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            sys.stderr.write(f"{leaving.code}\n")
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    return code


def _fork_guard(
    guard: ModuleType, entry: ModuleType, request: dict[str, Any], fds: list[int]
) -> int:
    """Fork a guard that forks the server; return the guard's pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        log, far_end = fds
        os.dup2(log, 1)
        os.dup2(log, 2)
        channel = socket.socket(fileno=far_end)
        code = guard.supervise(
            lambda: _serve(entry, request["argv"]), channel, float(request["grace_s"])
        )
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code & 0xFF)


def _fork_check(check: ModuleType, lists: list[list[str]], channel: socket.socket) -> None:
    """Answer from a child, so that what the parser leaves behind ends with it."""
    if os.fork():
        return
    try:
        _say(channel, check.check(lists))
    except Exception as error:
        _say(channel, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def _reap(*_: Any) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _say(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Read one request with its descriptors; `None` when kvtune is gone."""
    text, fds = b"", []
    while not text.endswith(b"\n"):
        part, more, _, _ = socket.recv_fds(channel, 1 << 16, 2)
        if not part:
            return None
        text += part
        fds += more
    return json.loads(text), fds


def main() -> None:
    """Answer requests until the channel ends."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    try:
        siblings = {name: _load_sibling(name) for name in ("guard", "argument_check")}
        entry = _import_vllm()
        said: dict[str, Any] = {"ready": True}
    except BaseException as error:
        traceback.print_exc()
        said = {"error": f"{type(error).__name__}: {error}"}
    _say(channel, said)
    # From here on, so that an import that runs a command still gets its status.
    signal.signal(signal.SIGCHLD, _reap)
    while "error" not in said and (received := _receive(channel)) is not None:
        request, fds = received
        if request["do"] == "check":
            _fork_check(siblings["argument_check"], request["argument_lists"], channel)
        else:
            _say(channel, {"guard": _fork_guard(siblings["guard"], entry, request, fds)})
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    # This folder's modules are not meant to be importable by name from here.
    sys.path.pop(0)
    _run_under_preloads()
    main()
