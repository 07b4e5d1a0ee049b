"""Starting, failing and ending simulated servers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvtune import __version__
from kvtune.autotune.replays import request_failure
from kvtune.engines.base import RunningServer, ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.errors import BadInput, EngineError
from kvtune.profilers.load.client import ClosedLoop, replay
from kvtune.profilers.load.request import prepare
from kvtune.profilers.measure import ask_text
from kvtune.profilers.quality.canary import CanaryReport, judge_canary, run_canary
from kvtune.types import FailureClass, LoadRun, Request

FAST = {"simulate-time-scale": 0.02}


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    gone_by_s = time.monotonic() + 30
    while left := set(psutil.Process().children(recursive=True)) - before:
        assert time.monotonic() < gone_by_s, f"left running: {left}"
        time.sleep(0.02)


@pytest.fixture
def engine() -> SimulatedEngine:
    return SimulatedEngine(FAST)


def launch(engine: SimulatedEngine, log_path: Path, **options: Any) -> RunningServer:
    limit_s = options.pop("start_timeout_s", 30.0)
    arguments = {name.replace("_", "-"): value for name, value in options.items()}
    spec = ServerSpec("tiny", arguments=arguments)
    return engine.launch(spec, log_path=log_path, start_timeout_s=limit_s)


def load(server: RunningServer, requests: int = 12, **options: Any) -> LoadRun:
    prepared = [
        prepare(
            Request(prompt=f"request {index} has some words"),
            model=server.endpoint.model,
            index=index,
            fixed_length=True,
            output_tokens=20,
            cache_salt=None,
        )
        for index in range(requests)
    ]
    return asyncio.run(replay(server.endpoint, prepared, ClosedLoop(4), **options))


def canary(server: RunningServer) -> CanaryReport:
    return asyncio.run(run_canary(partial(ask_text, server.endpoint)))


def wait_for_failure(server: RunningServer) -> Any:
    deadline_s = time.monotonic() + 60
    while (failure := server.failure()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return failure


# --- a server that is fine ---


def test_it_describes_itself_as_part_of_kvtune(engine: SimulatedEngine) -> None:
    info = engine.describe()
    assert (info.name, info.platform) == ("simulated", "simulated")
    assert (info.version, info.distribution) == (__version__, "kvtune")


def test_a_server_serves_until_it_is_stopped(engine: SimulatedEngine, tmp_path: Path) -> None:
    log: list[str] = []
    spec = ServerSpec("model", served_model_name="nice", arguments={"block-size": 64})
    server = engine.launch(spec, log_path=tmp_path / "deep" / "log", on_log=log.append)
    assert server.endpoint.model == "nice"
    assert server.effective.block_size_tokens == 64
    assert server.warnings == ()
    run = load(server)
    assert all(record.ok and record.output_tokens == 20 for record in run.records)
    assert run.warnings == ()
    assert server.failure() is None
    server.stop()
    server.stop()
    assert server.failure() is None
    assert not psutil.pid_exists(server.endpoint.pid or 0)
    assert any("KV cache size" in line for line in log)
    assert "startup complete" in server.log_path.read_text()


def test_a_servers_own_arguments_win_over_the_engines(tmp_path: Path) -> None:
    engine = SimulatedEngine({**FAST, "block-size": 32, "max-model-len": 1024})
    with launch(engine, tmp_path / "log", block_size=256) as server:
        assert server.effective.block_size_tokens == 256
        assert server.effective.max_model_len_tokens == 1024


@pytest.mark.parametrize("scale", [0.02, 0.08])
def test_time_goes_by_in_proportion_to_the_time_scale(tmp_path: Path, scale: float) -> None:
    spec = {"simulate_time_scale": scale, "max_num_seqs": 4}
    with launch(SimulatedEngine(), tmp_path / "log", **spec) as server:
        load(server, 4)
        # A busy machine makes a run longer, never shorter.
        quickest_s = min(load(server, 40).duration_s for _ in range(4))
    # Ten rounds of 20 steps, each 20 ms and about 4 ms for its tokens and their KV.
    assert 0.9 < quickest_s / (200 * 0.024 * scale) < 2.0


def test_it_answers_the_canary(engine: SimulatedEngine, tmp_path: Path) -> None:
    with launch(engine, tmp_path / "log") as server:
        report = canary(server)
    assert [answer.right for answer in report.answers] == [True, True, True]
    assert [answer.garbage for answer in report.answers] == [None, None, None]


# --- starts that fail ---


@pytest.mark.parametrize(
    ("options", "failure", "says"),
    [
        (
            {"kv_cache_memory_bytes": "64M", "max_model_len": 4096},
            FailureClass.DOES_NOT_FIT,
            "estimated maximum model length is 2688",
        ),
        ({"kv_cache_memory_bytes": "1M"}, FailureClass.DOES_NOT_FIT, "No available memory"),
        ({"block_size": 16}, FailureClass.BAD_ARGUMENT, "No common block size for 16"),
        ({"block_sise": 32}, FailureClass.BAD_ARGUMENT, "did you mean --block-size"),
        ({"kv_cache_dtype": "fp7"}, FailureClass.BAD_ARGUMENT, "is not one of"),
        (
            {"max_num_seqs": 4, "max_num_active_seqs": 8},
            FailureClass.BAD_ARGUMENT,
            "cannot be greater than max_num_seqs",
        ),
        (
            {"max_num_batched_tokens": 8, "max_num_seqs": 16},
            FailureClass.BAD_ARGUMENT,
            "must be greater than or equal to max_num_seqs",
        ),
        ({"simulate_wrong_model": True}, FailureClass.WRONG_MODEL, "not-tiny"),
    ],
)
def test_a_start_that_fails_says_why(
    engine: SimulatedEngine,
    tmp_path: Path,
    options: dict[str, Any],
    failure: FailureClass,
    says: str,
) -> None:
    with pytest.raises(EngineError) as caught:
        launch(engine, tmp_path / "log", **options)
    assert caught.value.failure is failure
    assert says in caught.value.message
    assert caught.value.fix


def test_the_longest_length_that_would_fit_really_does(
    engine: SimulatedEngine, tmp_path: Path
) -> None:
    with launch(
        engine, tmp_path / "log", kv_cache_memory_bytes="64M", max_model_len=2688
    ) as server:
        assert server.failure() is None


def test_a_server_that_never_listens_hangs_at_start(
    engine: SimulatedEngine, tmp_path: Path
) -> None:
    with pytest.raises(EngineError) as caught:
        launch(engine, tmp_path / "log", simulate_never_ready=True, start_timeout_s=0.5)
    assert caught.value.failure is FailureClass.HANG_AT_START


def test_a_slow_start_is_waited_for(engine: SimulatedEngine, tmp_path: Path) -> None:
    with launch(engine, tmp_path / "log", simulate_slow_start=0.5) as server:
        assert server.start_s > 0.5


def test_a_port_that_is_taken_is_told(engine: SimulatedEngine, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = ServerSpec("tiny", port=taken.getsockname()[1])
        with pytest.raises(EngineError) as caught:
            engine.launch(spec, log_path=tmp_path / "log", start_timeout_s=60)
    assert caught.value.failure is FailureClass.PORT_TAKEN


def test_the_server_itself_tells_of_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["--port", str(taken.getsockname()[1])]
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "kvtune.engines.simulated.server", *words],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    assert ended.returncode == 1
    assert "address already in use" in ended.stdout


def test_kvtunes_own_arguments_cannot_be_overridden(
    engine: SimulatedEngine, tmp_path: Path
) -> None:
    with pytest.raises(BadInput):
        launch(engine, tmp_path / "log", port=1)


# --- faults under load ---


def test_a_crash_is_seen_and_ends_the_load(engine: SimulatedEngine, tmp_path: Path) -> None:
    with launch(engine, tmp_path / "log", simulate_crash_after_requests=6) as server:
        run = load(server, 40, should_stop=server.failure)
        failure = wait_for_failure(server)
    assert failure.failure is FailureClass.CRASH_UNDER_LOAD
    assert failure.message == "RuntimeError: simulated crash after 6 requests"
    assert sum(record.ok for record in run.records) <= 6
    assert request_failure(run) is not None
    assert server.failure() == failure


def test_a_server_that_is_killed_is_seen(engine: SimulatedEngine, tmp_path: Path) -> None:
    with launch(engine, tmp_path / "log") as server:
        os.kill(server.endpoint.pid or 0, signal.SIGKILL)
        assert wait_for_failure(server).failure is FailureClass.OUT_OF_MEMORY


def test_a_server_that_falls_silent_hangs_under_load(
    engine: SimulatedEngine, tmp_path: Path
) -> None:
    with launch(engine, tmp_path / "log", simulate_hang_after_requests=4) as server:
        run = load(server, 12, stall_timeout_s=0.5, scrape_interval_s=None)
        assert server.failure() is None  # the process lives: only the requests tell
    failure = request_failure(run)
    assert failure is not None
    assert failure.failure is FailureClass.HANG_UNDER_LOAD


def test_errors_are_counted_and_named(engine: SimulatedEngine, tmp_path: Path) -> None:
    with launch(engine, tmp_path / "log", simulate_error_rate=0.5) as server:
        first, again = load(server, 40), load(server, 40)
    errors = [record.error for record in (*first.records, *again.records) if record.error]
    assert 20 < len(errors) < 60
    assert set(errors) == {"HTTP 500: simulated internal error"}
    failure = request_failure(first)
    assert failure is not None
    assert failure.failure is FailureClass.REQUEST_ERRORS


def test_garbage_on_the_wire_is_an_error_of_its_request(
    engine: SimulatedEngine, tmp_path: Path
) -> None:
    with launch(engine, tmp_path / "log", simulate_garbage_after=6) as server:
        run = load(server, 12)
    errors = [record.error for record in run.records if record.error]
    assert len(errors) == 6
    assert all("malformed stream" in error for error in errors)


def test_broken_output_fails_the_canary(engine: SimulatedEngine, tmp_path: Path) -> None:
    with launch(engine, tmp_path / "log") as server:
        baseline = canary(server)
    with launch(engine, tmp_path / "log", simulate_broken_output=True) as server:
        assert judge_canary(canary(server), baseline).outcome == "broken"


def test_a_broken_kv_format_doubles_capacity_and_looks_fine_on_short_prompts(
    engine: SimulatedEngine, tmp_path: Path
) -> None:
    short = Request(prompt="a short prompt", output_tokens=10)
    seen = {}
    for dtype in ("auto", "fp8", "nvfp4"):
        with launch(engine, tmp_path / "log", kv_cache_dtype=dtype) as server:
            text = asyncio.run(ask_text(server.endpoint, short))
            seen[dtype] = (server.effective.num_gpu_blocks or 0, text, canary(server))
    assert seen["nvfp4"][0] == seen["fp8"][0] >= 2 * seen["auto"][0]
    assert seen["nvfp4"][1] == seen["fp8"][1] == seen["auto"][1]
    assert judge_canary(seen["fp8"][2], seen["auto"][2]).outcome == "ok"
    assert judge_canary(seen["nvfp4"][2], seen["auto"][2]).outcome == "broken"


def test_a_server_is_there_soon_as_it_imports_little() -> None:
    code = (
        "import sys, kvtune.engines.simulated.server\n"
        "assert not {'pydantic', 'numpy', 'torch', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- no orphans ---

_OWNER = """
import sys, time
from pathlib import Path
from kvtune.engines.base import ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine

server = SimulatedEngine().launch(ServerSpec("tiny"), log_path=Path(sys.argv[1]))
print(server.endpoint.pid, flush=True)
time.sleep(60)
"""


def test_no_server_outlives_a_kvtune_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        server = psutil.Process(int(owner.stdout.readline()))
        owned = [*psutil.Process(owner.pid).children(recursive=True)]
        assert server in owned
        owner.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(owned, timeout=30)
    assert alive == []
