"""What tells one checkpoint from another."""

import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvtune.engines.vllm.plugin.tiers.weights import has_weights, weights_digest


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text('{"rope_theta": 10000}')
    (tmp_path / "model.safetensors").write_bytes(os.urandom(3 << 20))
    return tmp_path


def test_the_same_content_elsewhere_is_the_same(model, tmp_path_factory):
    other = tmp_path_factory.mktemp("copy")
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert weights_digest(str(other)) == weights_digest(str(model))


def test_retrained_weights_of_the_same_size_are_others(model):
    before = weights_digest(str(model))
    (model / "model.safetensors").write_bytes(os.urandom(3 << 20))
    assert weights_digest(str(model)) != before


@pytest.mark.parametrize("place", [0, (3 << 20) - 1])
def test_the_ends_of_a_file_count(model, place):
    before = weights_digest(str(model))
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    assert weights_digest(str(model)) != before


def test_one_tensor_among_many_counts(tmp_path):
    def save(trained=None):
        tensors = {f"layers.{n}": np.full(1 << 16, n == trained, np.float32) for n in range(200)}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return weights_digest(str(tmp_path))

    before = save()
    assert save() == before
    assert len({before, *(save(trained) for trained in (0, 50, 101, 199))}) == 5


def test_another_setting_of_the_model_makes_it_another(model):
    before = weights_digest(str(model))
    (model / "config.json").write_text('{"rope_theta": 20000}')
    assert weights_digest(str(model)) != before


def test_a_name_on_a_hub_has_no_weights_here(model, tmp_path):
    assert has_weights(str(model))
    assert has_weights(str(model / "model.safetensors"))
    assert not has_weights("somebody/some-model")
    (model / "model.safetensors").unlink()
    assert not has_weights(str(model))
