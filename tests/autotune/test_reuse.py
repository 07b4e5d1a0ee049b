"""When a server is used again, and when it is not: on servers that only keep a record."""

import contextlib
from pathlib import Path

import psutil
import pytest

from kvtune.autotune.reuse import ServerPool
from kvtune.engines.base import CannotChange, Engine, RunningServer, ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.errors import EngineError
from kvtune.types import EffectiveConfig, Endpoint, EngineInfo, Failure, FailureClass

LIVE = {"max-num-seqs", "watermark"}
STOCK_SEQS = 128
DEAD = Failure(failure=FailureClass.CRASH_UNDER_LOAD, message="it is gone")


class Server(RunningServer):
    """Records what happens to it. `refuses` is raised by its next change."""

    def __init__(self, spec, log_path):
        self.endpoint = Endpoint("http://127.0.0.1:1", spec.model_name)
        self.started = self.arguments = dict(spec.arguments)
        self.log_path = log_path
        self.start_s = 10.0
        self.effective = self.read_back()
        self.stops = 0
        self.refuses = None
        self.died = None

    def read_back(self, kind="cold"):
        seqs = self.arguments.get("max-num-seqs", STOCK_SEQS)
        return EffectiveConfig(max_num_seqs=seqs, start_kind=kind)

    def change(self, arguments):
        if self.refuses is not None:
            raise self.refuses
        self.arguments = dict(arguments)
        self.effective = self.read_back("live")
        return self.effective

    def failure(self):
        return self.died

    def stop(self):
        self.stops += 1

    @property
    def runs(self):
        return not self.stops


class Recorder(Engine):
    name = "recorder"

    def __init__(self, on_launch=lambda server: None):
        self.servers = []
        self.on_launch = on_launch

    def describe(self):
        return EngineInfo(
            name=self.name, version="1", distribution="", platform="simulated", python=None
        )

    def check_arguments(self, arguments, model):
        return ()

    def live_arguments(self, arguments):
        return frozenset() if "nothing-live" in arguments else frozenset(LIVE)

    def launch(self, spec, *, log_path, start_timeout_s=300, on_log=None):
        assert not any(server.runs for server in self.servers), "two servers at a time"
        server = Server(spec, log_path)
        self.servers.append(server)
        self.on_launch(server)
        return server


@pytest.fixture
def engine():
    return Recorder()


@pytest.fixture
def pool(engine):
    with ServerPool(engine) as pool:
        yield pool
    assert not any(server.runs for server in engine.servers)


@pytest.fixture
def use(pool, tmp_path):
    def use(arguments=None, *, good=True, reusable=True, **fields):
        spec = ServerSpec("m", arguments=arguments or {}, reusable=reusable, **fields)
        with pool.launch(spec, log_path=tmp_path / "trial.log") as server:
            if good:
                server.keep()
        return server

    return use


def test_a_server_is_changed_where_only_live_options_differ(engine, use):
    assert use().effective.start_kind == "cold"
    changed = use({"max-num-seqs": 8, "watermark": 0.1})
    (server,) = engine.servers
    assert server.arguments == {"max-num-seqs": 8, "watermark": 0.1}
    assert (changed.effective.max_num_seqs, changed.effective.start_kind) == (8, "live")
    assert changed.start_s < 10.0
    assert server.runs


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"block-size": 32}, {}),
        ({"nothing-live": True}, {}),
        ({}, {"environment": {"A": "1"}}),
        ({}, {"served_model_name": "other"}),
    ],
)
def test_a_server_is_stopped_where_more_differs(engine, use, arguments, fields):
    use()
    use(arguments, **fields)
    first, second = engine.servers
    assert (first.runs, second.runs) == (False, True)


def test_what_must_have_a_server_of_its_own_gets_one_and_leaves_none(engine, use):
    use()
    own = use(reusable=False)
    first, second = engine.servers
    assert own is second
    assert not first.runs
    assert not second.runs


def test_a_server_that_was_not_found_in_order_is_ended(engine, use):
    use(good=False)
    assert not engine.servers[0].runs
    use()
    assert len(engine.servers) == 2


def test_a_server_that_died_while_it_waited_is_not_used_again(engine, use):
    use()
    engine.servers[0].died = DEAD
    assert use({"watermark": 0.1}).effective.start_kind == "cold"
    assert not engine.servers[0].runs


def test_a_server_that_died_in_its_use_is_ended_though_all_seemed_well(engine, pool, tmp_path):
    spec = ServerSpec("m", reusable=True)
    with pool.launch(spec, log_path=tmp_path / "log") as server:
        server.keep()
        engine.servers[0].died = DEAD
        assert server.failure() == DEAD
    assert not engine.servers[0].runs


def test_a_change_that_is_refused_is_a_start(engine, use):
    use()
    engine.servers[0].refuses = CannotChange("not now")
    assert use({"watermark": 0.1}).effective.start_kind == "cold"
    assert [server.runs for server in engine.servers] == [False, True]


def test_a_server_that_dies_in_a_change_is_the_failure_of_who_asked(engine, use):
    use()
    engine.servers[0].refuses = EngineError(FailureClass.CRASH_UNDER_LOAD, "died of it", "")
    with pytest.raises(EngineError, match="died of it"):
        use({"watermark": 0.1})
    assert [server.runs for server in engine.servers] == [False]


@pytest.mark.parametrize("where", ["changing", "narrowing", "using", "waiting"])
def test_an_interrupt_leaves_no_server(where, tmp_path):
    def on_launch(server):
        if where == "narrowing" and len(engine.servers) > 1:
            server.refuses = KeyboardInterrupt()

    engine = Recorder(on_launch)
    log = tmp_path / "log"
    with contextlib.suppress(KeyboardInterrupt), ServerPool(engine) as pool:
        with pool.launch(ServerSpec("m", reusable=True), log_path=log) as server:
            server.keep()
        if where == "changing":
            engine.servers[0].refuses = KeyboardInterrupt()
        if where == "waiting":
            raise KeyboardInterrupt
        arguments = {"max-num-seqs": 8} | ({"block-size": 32} if where == "narrowing" else {})
        spec = ServerSpec("m", arguments=arguments, reusable=True)
        with pool.launch(spec, log_path=log):
            raise KeyboardInterrupt
    assert len(engine.servers) == (2 if where == "narrowing" else 1)
    assert not any(server.runs for server in engine.servers)


def test_a_new_server_is_started_with_room_for_what_comes_next(engine, use):
    use()
    narrow = use({"block-size": 32, "max-num-seqs": 8})
    assert engine.servers[1].started == {"block-size": 32}
    assert (narrow.effective.max_num_seqs, narrow.effective.start_kind) == (8, "narrowed")
    assert narrow.start_s > 10.0, "the start, and what the change took"
    assert use({"block-size": 32, "max-num-seqs": 12}).effective.start_kind == "live"
    assert len(engine.servers) == 2


def test_what_is_wider_than_stock_is_started_as_it_is(engine, use):
    use()
    use({"block-size": 32, "max-num-seqs": 256})
    assert engine.servers[1].started == {"block-size": 32, "max-num-seqs": 256}


def test_without_knowing_the_stock_width_nothing_is_left_out(engine, use):
    use({"max-num-seqs": 8})
    assert engine.servers[0].started == {"max-num-seqs": 8}
    assert engine.servers[0].effective.start_kind == "cold"


def test_a_server_that_cannot_be_narrowed_is_started_again_and_the_next_ones_at_once(tmp_path):
    def on_launch(server):
        server.refuses = CannotChange("kernels are compiled")

    engine = Recorder(on_launch)
    with ServerPool(engine) as pool:
        for arguments in ({}, {"block-size": 32, "max-num-seqs": 8}, {"max-num-seqs": 8}):
            spec = ServerSpec("m", arguments=arguments, reusable=True)
            with pool.launch(spec, log_path=tmp_path / "log") as server:
                server.keep()
            if "block-size" in arguments:
                (warning,) = server.warnings
    assert warning == "started twice, as it could not be changed: kernels are compiled"
    assert [server.started for server in engine.servers] == [
        {},
        {"block-size": 32},
        {"block-size": 32, "max-num-seqs": 8},
        {"max-num-seqs": 8},
    ]


def test_without_reuse_every_server_is_a_new_one(engine, tmp_path):
    with ServerPool(engine, reuse=False) as pool:
        for _ in range(2):
            spec = ServerSpec("m", reusable=True)
            with pool.launch(spec, log_path=tmp_path / "log") as server:
                server.keep()
    assert len(engine.servers) == 2


def test_the_log_of_who_started_no_server_says_where_to_read_on(pool, tmp_path):
    for number in range(2):
        log = tmp_path / f"trial-{number}.log"
        with pool.launch(ServerSpec("m", reusable=True), log_path=log) as server:
            server.keep()
    assert "that of trial-0.log was changed" in log.read_text()


def test_real_processes_are_reused_and_ended(tmp_path: Path):
    base = {"simulate-time-scale": 0.02, "max-model-len": 2048}
    pids = []
    with SimulatedEngine() as engine, ServerPool(engine) as pool:
        for changed in ({}, {"max-num-seqs": 4}, {"block-size": 64, "max-num-seqs": 6}):
            spec = ServerSpec("tiny", arguments={**base, **changed}, reusable=True)
            with pool.launch(spec, log_path=tmp_path / "log") as server:
                server.keep()
            pids.append(server.endpoint.pid)
            assert server.effective.max_num_seqs == changed.get("max-num-seqs", 128)
            assert server.warnings == ()
        assert psutil.pid_exists(pids[2])
    assert pids[0] == pids[1] != pids[2]
    assert not any(psutil.pid_exists(pid) for pid in pids)
