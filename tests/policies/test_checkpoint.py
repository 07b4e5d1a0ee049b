import json

import pytest

from kvtune.policies.checkpoint import model_shape, vocab_size, weight_bytes


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a directory with files of these sizes in bytes."""

    def make(index=None, **sizes):
        for name, size in sizes.items():
            (tmp_path / name).write_bytes(b"w" * size)
        if index is not None:
            (tmp_path / "model.safetensors.index.json").write_text(index)
        return str(tmp_path)

    return make


def index_of(*names):
    return json.dumps({"metadata": {}, "weight_map": {f"w{i}": n for i, n in enumerate(names)}})


SHARDS = {"model-1-of-2.safetensors": 30, "model-2-of-2.safetensors": 12}
MISTRAL = {**SHARDS, "consolidated.safetensors": 42}


def test_weights_are_the_files_that_the_index_names(checkpoint):
    path = checkpoint(index_of(*SHARDS, *SHARDS), **MISTRAL)
    assert weight_bytes(path) == 42


@pytest.mark.parametrize("index", [None, "not JSON", "[]", "{}", '{"weight_map": 3}'])
def test_weights_that_a_checkpoint_holds_twice_count_once(index, checkpoint):
    assert weight_bytes(checkpoint(index, **MISTRAL)) == 42


@pytest.mark.parametrize(
    ("sizes", "size"),
    [
        ({"consolidated.safetensors": 7}, 7),
        ({"model.safetensors": 5, "pytorch_model.bin": 9}, 5),
        ({"pytorch_model-1.bin": 4, "pytorch_model-2.bin": 5, "training_args.bin": 100}, 9),
        ({"weights.gguf": 3}, 3),
        ({"config.json": 3}, None),
    ],
)
def test_other_files_count_where_there_is_no_better_kind(sizes, size, checkpoint):
    assert weight_bytes(checkpoint(**sizes)) == size


def test_a_download_that_is_not_complete_has_no_size(checkpoint):
    path = checkpoint(index_of(*SHARDS), **{"model-1-of-2.safetensors": 30})
    assert weight_bytes(path) is None


def test_nothing_is_known_of_a_hub_id_or_an_unknown_architecture(tmp_path):
    assert weight_bytes("org/name") is None
    assert model_shape("org/name") is None
    (tmp_path / "config.json").write_text('{"architectures": ["Mamba"], "vocab_size": 9}')
    assert model_shape(str(tmp_path)) is None
    assert vocab_size(str(tmp_path)) is None
