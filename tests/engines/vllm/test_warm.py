"""Servers forked from a parent that has the stand-in for vLLM imported."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from kvtune.engines.vllm import warm_parent
from kvtune.engines.vllm.readiness import free_port
from kvtune.engines.vllm.warm import WarmParent, WarmTrouble


@pytest.fixture
def parent(fake_vllm, short_grace):
    parent = WarmParent(sys.executable, {})
    yield parent
    parent.close()


@pytest.fixture
def serve(parent, tmp_path, wait_for):
    """Fork a server and return it with its port, once it answers."""

    def serve(*words):
        port = free_port("127.0.0.1")
        argv = ["--model", "m", "--host", "127.0.0.1", "--port", str(port), *words]
        server = parent.serve(argv, tmp_path / f"{port}.log")

        def up():
            try:
                return get(port, "/health") == {}
            except OSError:
                assert server.poll() is None
                return False

        wait_for(up)
        return server, port

    return serve


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return json.load(answer)


def test_forked_servers_are_processes_of_their_own_that_import_nothing(serve, tmp_path):
    (first, port), (second, other_port) = serve(), serve()
    mine, other = get(port, "/self"), get(other_port, "/self")
    assert (mine["pid"], other["pid"]) == (first.pid, second.pid)
    assert mine["argv"] == [
        "api_server",
        "--model",
        "m",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    assert mine["sid"] == first.guard_pid != other["sid"]
    assert len((tmp_path / "imports").read_text().split()) == 1
    first.stop()
    assert first.poll() == 0
    assert get(other_port, "/self")["pid"] == second.pid
    second.stop()


def test_each_server_has_a_log_of_its_own(serve, tmp_path):
    (first, port), (second, other_port) = serve("--fake-print", "one"), serve("--fake-print", "two")
    first.stop()
    second.stop()
    assert (tmp_path / f"{port}.log").read_text() == "one\n"
    assert (tmp_path / f"{other_port}.log").read_text() == "two\n"


def test_stopping_a_forked_server_ends_its_whole_tree_and_leaves_the_parent(
    serve, parent, stubborn, tmp_path, alive, wait_for
):
    _, read_pids = stubborn
    server, _ = serve("--fake-pids", str(tmp_path / "pids"))
    pids = read_pids(tmp_path / "pids")
    server.stop()
    wait_for(lambda: not any(map(alive, [*pids, server.pid, server.guard_pid])))
    assert parent.check([["--max-num-seqs", "4"]])["problems"] == [None]


def test_no_forked_server_outlives_its_parent(serve, parent, stubborn, tmp_path, alive, wait_for):
    _, read_pids = stubborn
    server, _ = serve("--fake-pids", str(tmp_path / "pids"))
    pids = [*read_pids(tmp_path / "pids"), server.pid, server.guard_pid]
    parent.close()
    wait_for(lambda: not any(map(alive, pids)))
    server.stop()


def test_no_forked_server_outlives_a_killed_kvtune(fake_vllm, stubborn, tmp_path, alive, wait_for):
    _, read_pids = stubborn
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from kvtune.engines.vllm import process, warm\n"
        "process.GRACE_S = warm.GRACE_S = 0.6\n"
        "parent = warm.WarmParent(sys.executable, {})\n"
        "server = parent.serve(sys.argv[2:], Path(sys.argv[1]))\n"
        "time.sleep(60)\n"
    )
    port = str(free_port("127.0.0.1"))
    words = ["--model", "m", "--port", port, "--fake-pids", str(tmp_path / "pids")]
    kvtune = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "log"), *words])
    pids = read_pids(tmp_path / "pids")
    pids += [child.pid for child in psutil.Process(kvtune.pid).children(recursive=True)]
    kvtune.send_signal(signal.SIGKILL)
    kvtune.wait(10)
    wait_for(lambda: not any(map(alive, pids)))


def test_the_parser_judges_in_a_process_of_its_own(parent):
    answer = parent.check([["--max-num-seqs", "many"], [], ["--block-size", "7"]])
    assert answer["problems"] == [
        "argument --max-num-seqs: invalid int value: 'many'",
        None,
        "ValueError: block_size must be a multiple of 8",
    ]
    assert "--no-enable-prefix-caching" in answer["options"]


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("broken-import", "libfake.so: cannot open shared object file"),
        ("garbage", "answered garbage"),
        ("dies", "the warm parent ended"),
    ],
)
def test_a_parent_that_cannot_serve_is_told_and_leaves_nothing(
    fake_vllm, monkeypatch, new_children, trouble, said
):
    monkeypatch.setenv("FAKE_VLLM", trouble)
    with pytest.raises(WarmTrouble, match=said):
        WarmParent(sys.executable, {})
    assert new_children() == []


def test_a_parent_that_was_killed_cannot_serve_and_says_so(parent, tmp_path, warm_parents):
    (process,) = warm_parents()
    process.kill()
    process.wait(10)
    with pytest.raises(WarmTrouble):
        parent.serve(["--model", "m"], tmp_path / "log")


@pytest.mark.parametrize(
    ("binding", "cpus"),
    [
        ("0 1", [0, 1]),
        ("{0,1,12}", [0, 1, 12]),
        ("granularity=fine,explicit,proclist=[3,4]", [3, 4]),
    ],
)
def test_every_form_of_an_openmp_binding_is_understood(binding, cpus):
    assert warm_parent._cpu_list(binding) == cpus


def test_a_forked_worker_is_bound_as_its_environment_asks(fake_vllm):
    cpu = min(os.sched_getaffinity(0))
    code = (
        "import os, sys, importlib.util\n"
        "spec = importlib.util.spec_from_file_location('warm_parent', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "os.register_at_fork(after_in_child=module._bind_worker)\n"
        "import torch\n"
        "def look():\n"
        "    if os.fork() == 0:\n"
        "        print(sorted(os.sched_getaffinity(0)), torch.get_num_threads(), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "look()\n"
        f"os.environ.update(GOMP_CPU_AFFINITY='{cpu}', OMP_NUM_THREADS='1')\n"
        "look()\n"
    )
    script = Path(warm_parent.__file__)
    environment = {k: v for k, v in os.environ.items() if k not in warm_parent._BINDINGS}
    done = subprocess.run(
        [sys.executable, "-c", code, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{sorted(os.sched_getaffinity(0))} 2\n[{cpu}] 1\n"


def test_an_idle_parent_uses_no_processor(parent, warm_parents):
    (process,) = warm_parents()
    before = process.cpu_times()
    time.sleep(0.5)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.05
