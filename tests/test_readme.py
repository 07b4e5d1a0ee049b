"""What README and the help of the command line give as examples does what they say."""

import re
import shlex
from pathlib import Path

import pytest

from kvtune.autotune.cli import options

README = Path(__file__).parent.parent / "README.md"
HELP = options.EngineCommand.__metadata__[0].help
CONTAINERS = re.findall(r"(docker run [^'\"`]*\{args\})", README.read_text() + HELP)


@pytest.mark.parametrize("command", CONTAINERS)
def test_containers_that_end_with_their_server_leave_the_next_what_vllm_compiled(command):
    """A container of `--rm` takes its home with it, and with that vLLM's compile cache."""
    words = shlex.split(command)
    assert "--rm" in words
    mounts = [words[at + 1].split(":") for at, word in enumerate(words) if word == "-v"]
    assert "/root/.cache/vllm" in [mount[1] for mount in mounts]


def test_there_are_examples_of_containers_in_both_places():
    assert len(CONTAINERS) == 2
