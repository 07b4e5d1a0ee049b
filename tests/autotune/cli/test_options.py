import pytest

from kvtune.autotune.cli.options import base_arguments
from kvtune.errors import BadInput


@pytest.mark.parametrize("text", ["--api-key sk-1", "--hf-token=hf_1 --max-model-len 64"])
def test_a_secret_in_engine_args_is_refused(text):
    with pytest.raises(BadInput, match="is a secret"):
        base_arguments(text, None)


def test_kv_memory_is_an_engine_argument_that_is_given_once():
    assert base_arguments("--max-model-len 64", "64MiB") == {
        "max-model-len": 64,
        "kv-cache-memory-bytes": 64 << 20,
    }
    with pytest.raises(BadInput, match="given twice"):
        base_arguments("--kv-cache-memory-bytes 1G", "64MiB")
