import shlex
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.engines.base import ServerSpec
from kvtune.engines.vllm.command import fill_command, read_command
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.errors import BadInput

ARGV = ["--model", "/a b/m", "--compilation-config", '{"level": 3}', "--note", "it's $HOME"]
SERVER = f"{shlex.quote(sys.executable)} -m vllm.entrypoints.launchers.api_server.entry"
words = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=20))


def test_arguments_are_words_of_their_own():
    template = read_command("env A=1 vllm serve {args} --last")
    filled = fill_command(template, ARGV, model="m", port=1)
    assert filled == ["env", "A=1", "vllm", "serve", *ARGV, "--last"]


@pytest.mark.parametrize("program", ["ssh", "/usr/bin/ssh"])
def test_arguments_survive_the_shell_at_the_far_end_of_ssh(program):
    filled = fill_command([program, "host", "vllm", "serve", "{args}"], ARGV, model="m", port=1)
    # What ssh does: it joins the words of the command, and a shell reads them.
    assert shlex.split(" ".join(filled[2:])) == ["vllm", "serve", *ARGV]


@given(words)
def test_any_arguments_survive_ssh_and_a_shell_word(argv):
    remote = fill_command(["ssh", "host", "run", "{args}"], argv, model="m", port=1)
    assert shlex.split(" ".join(remote[2:])) == ["run", *argv]
    local = fill_command(["sh", "-c", "run {args}"], argv, model="m", port=1)
    assert shlex.split(local[2]) == ["run", *argv]


def test_a_real_shell_reads_back_what_was_quoted():
    filled = fill_command(["sh", "-c", "printf '%s\\n' {args}"], ARGV, model="m", port=1)
    assert subprocess.check_output(filled, text=True).splitlines() == ARGV


def test_model_and_port_are_put_in_where_they_are_asked_for():
    filled = fill_command(["run", "-v{model}:{model}", "-p{port}", "{args}"], [], model="m", port=7)
    assert filled == ["run", "-vm:m", "-p7"]


@pytest.mark.parametrize(
    "command",
    [
        f"{SERVER} {{args}}",
        f"{SERVER} --model {{model}} --port {{port}} {{args}}",
        f'/bin/sh -c "exec {SERVER} {{args}}"',
    ],
)
def test_a_command_starts_the_server_with_the_arguments_in_their_place(
    fake_vllm, tmp_path, command, alive
):
    engine = VllmEngine(command=command)
    info = engine.describe()
    assert (info.version, info.platform, info.python, info.tested) == (
        "unknown",
        "unknown",
        None,
        False,
    )
    assert engine.check_arguments({"no-such-thing": 1}, "org/model") == ()
    spec = ServerSpec("org/model", arguments={"max-num-seqs": 4, "fake-print": "two words"})
    with engine.launch(spec, log_path=tmp_path / "log", start_timeout_s=20) as server:
        assert server.effective.max_num_seqs == 4
        assert server.effective.start_kind == "cold"
        # Now the server has told.
        info = engine.describe()
        assert (info.version, info.platform, info.tested) == ("0.32.7", "cpu", True)
    assert (tmp_path / "log").read_text() == "two words\n"
    assert not alive(server.endpoint.pid)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("docker run image", "has no {args}"),
        ("docker run 'image {args}", "cannot be read"),
        ("no-such-program-here {args}", "not an executable"),
    ],
)
def test_a_command_that_cannot_work_is_refused_at_once(command, said):
    with pytest.raises(BadInput) as caught:
        VllmEngine(command=command)
    assert said in caught.value.message
    assert caught.value.fix
