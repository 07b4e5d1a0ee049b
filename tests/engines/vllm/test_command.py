import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.engines.vllm.command import fill_command, read_command

ARGV = ["--model", "/a b/m", "--compilation-config", '{"level": 3}', "--note", "it's $HOME"]
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
