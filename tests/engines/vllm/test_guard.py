"""Nothing that kvtune starts outlives it, and nothing else is ever signalled."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from kvtune.engines.vllm.process import start_guarded

# kvtune, as far as it matters here: it starts a tree under a guard, says so, and waits.
DRIVER = """
import os, signal, sys, time
from pathlib import Path
from kvtune.engines.vllm import process
process.GRACE_S = 0.6
kept = process.start_guarded(sys.argv[2:], os.environ, Path(sys.argv[1]))
print(kept.guard_pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def driver(tmp_path, stubborn):
    words, read_pids = stubborn
    started = []

    def start(**options):
        pids = tmp_path / "pids"
        kvtune = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path / "log"), *words, str(pids)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            **options,
        )
        started.append(kvtune)
        return kvtune, [int(kvtune.stdout.readline()), *read_pids(pids)]

    yield start
    for kvtune in started:
        kvtune.kill()
        kvtune.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_kvtune_that_is_ended_by_a_signal(driver, number, alive, wait_for):
    kvtune, pids = driver()
    assert all(map(alive, pids))
    kvtune.send_signal(number)
    kvtune.wait(10)
    wait_for(lambda: not any(map(alive, pids)))


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(driver):
    kvtune, pids = driver(start_new_session=True)
    # A terminal signals the foreground group of its session.
    assert os.getsid(kvtune.pid) not in {os.getsid(pid) for pid in pids}
    assert os.getpgid(kvtune.pid) not in {os.getpgid(pid) for pid in pids}


def test_stop_ends_a_tree_that_ignores_sigterm(tmp_path, stubborn, short_grace, alive):
    words, read_pids = stubborn
    process = start_guarded([*words, str(tmp_path / "pids")], os.environ, tmp_path / "log")
    pids = read_pids(tmp_path / "pids")
    assert process.pid in pids
    assert process.poll() is None
    start_s = time.monotonic()
    process.stop()
    assert time.monotonic() - start_s < 5
    assert not any(map(alive, [*pids, process.guard_pid]))
    assert process.poll() == -signal.SIGKILL
    assert process.leftover_pids == ()
    process.stop()


def test_what_a_dead_server_leaves_behind_is_ended_and_its_status_kept(
    tmp_path, stubborn, short_grace, alive, wait_for
):
    words, read_pids = stubborn
    process = start_guarded([*words, str(tmp_path / "pids"), "7"], os.environ, tmp_path / "log")
    pids = read_pids(tmp_path / "pids", count=3)
    wait_for(lambda: process.poll() is not None)
    assert process.poll() == 7
    wait_for(lambda: not any(map(alive, pids)))
    process.stop()


def test_a_process_of_somebody_else_is_left_alone(tmp_path, stubborn, short_grace):
    bystander = subprocess.Popen(["sleep", "60"])
    words, read_pids = stubborn
    process = start_guarded([*words, str(tmp_path / "pids")], os.environ, tmp_path / "log")
    read_pids(tmp_path / "pids")
    process.stop()
    try:
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_server_that_leaves_by_itself_on_sigterm_is_not_killed(tmp_path, wait_for):
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('bye', flush=True)))\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "log"
    process = start_guarded([sys.executable, "-c", code], os.environ, log)
    wait_for(lambda: log.read_text() == "up\n")
    process.stop()
    assert log.read_text() == "up\nbye\n"
    assert process.poll() == 0


@pytest.mark.parametrize(
    ("code", "status"),
    [("raise SystemExit(5)", 5), ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV)],
)
def test_the_exit_status_is_the_commands_own(tmp_path, code, status, wait_for):
    process = start_guarded([sys.executable, "-c", code], os.environ, tmp_path / "log")
    wait_for(lambda: process.poll() is not None)
    assert process.poll() == status
    process.stop()


def test_a_command_that_does_not_exist_says_so_in_the_log(tmp_path, wait_for):
    log = tmp_path / "log"
    process = start_guarded([str(tmp_path / "no-such-program")], os.environ, log)
    wait_for(lambda: process.poll() is not None)
    assert process.poll() == 127
    assert "cannot start the server: [Errno 2] No such file" in log.read_text()
    process.stop()


def test_a_killed_guard_is_noticed_and_takes_the_server_with_it(tmp_path, alive, wait_for):
    process = start_guarded(["sleep", "60"], os.environ, tmp_path / "log")
    os.kill(process.guard_pid, signal.SIGKILL)
    wait_for(lambda: process.poll() is not None)
    assert process.poll() == -signal.SIGKILL
    wait_for(lambda: not alive(process.pid))
    process.stop()


def test_the_server_holds_neither_the_channel_nor_what_kvtune_has_open(tmp_path, wait_for):
    near, far = socket.socketpair()
    far.set_inheritable(True)
    code = "import os; print(sorted(os.listdir('/proc/self/fd')), flush=True)"
    log = tmp_path / "log"
    with near, far:
        process = start_guarded([sys.executable, "-c", code], os.environ, log)
        wait_for(lambda: process.poll() is not None)
    # 3 is the listing itself.
    assert log.read_text() == "['0', '1', '2', '3']\n"
    process.stop()
