"""The emitted files of one realistic config, line by line. Read the difference before updating."""

from pathlib import Path

import pytest
from contracts.emitter_samples import cpu_config, realistic_config

from kvtune.autotune.emit.base import emitters

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", sorted(emitters()))
def test_gpu_files_read_as_reviewed(name):
    for file, text in emitters()[name]().render(realistic_config()).items():
        assert text == (GOLDEN / file).read_text()


def test_cpu_script_reads_as_reviewed():
    files = emitters()["shell"]().render(cpu_config())
    assert files["serve.sh"] == (GOLDEN / "serve-cpu.sh").read_text()


def test_every_golden_file_is_checked():
    emitted = {
        file for emitter in emitters().values() for file in emitter().render(realistic_config())
    }
    assert {path.name for path in GOLDEN.iterdir()} == {*emitted, "serve-cpu.sh"}
