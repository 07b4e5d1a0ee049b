"""What was learned from a model is kept with it, and refused on any other."""

import json

import pytest
import torch
from safetensors.torch import save_file

from kvtune.errors import BadInput
from kvtune.policies.calibration import Calibration, made_once
from kvtune.policies.methods.palu import Palu

METHOD = Palu(group_heads=2)


def calibration(model_hash="m"):
    generator = torch.Generator().manual_seed(0)
    learned = {
        (layer, role): {
            "basis": torch.randn(2, 3, generator=generator),
            "levels.low": torch.randn(4, generator=generator).half(),
        }
        for layer in (0, 11)
        for role in ("key", "value")
    }
    return Calibration(METHOD.name, METHOD.calibration_key, model_hash, learned)


def test_a_file_gives_back_what_was_saved(tmp_path):
    saved = calibration()
    saved.save(tmp_path / "palu.safetensors")
    found = Calibration.load(tmp_path / "palu.safetensors")
    assert (found.method, found.key, found.model_hash) == (saved.method, saved.key, "m")
    assert found.learned.keys() == saved.learned.keys()
    for place, tensors in saved.learned.items():
        assert found.learned[place].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found.learned[place][name].dtype == tensor.dtype
            assert torch.equal(found.learned[place][name], tensor)


def test_other_weights_and_other_parameters_are_refused():
    calibration().check(METHOD, "m")
    with pytest.raises(BadInput, match="other weights"):
        calibration().check(METHOD, "another")
    with pytest.raises(BadInput, match="other parameters"):
        calibration().check(Palu(group_heads=4), "m")
    calibration().check(Palu(group_heads=2, keep_ratio=0.25), "m")


ABOUT = {"method": "palu", "key": "k", "model_hash": "m"}


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("0.key.basis", None),
        ("0.key.basis", "no json"),
        ("0.key.basis", "[]"),
        ("0.key.basis", json.dumps({"method": "palu"})),
        ("basis", json.dumps(ABOUT)),
        ("first.key.basis", json.dumps(ABOUT)),
        ("0.query.basis", json.dumps(ABOUT)),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(tmp_path, name, about):
    path = tmp_path / "other.safetensors"
    save_file({name: torch.zeros(2)}, path, metadata=None if about is None else {"kvtune": about})
    with pytest.raises(BadInput, match="calibration"):
        Calibration.load(path)


def test_a_missing_or_broken_file_is_refused(tmp_path):
    with pytest.raises(BadInput, match="is not a calibration"):
        Calibration.load(tmp_path / "absent.safetensors")
    (tmp_path / "broken").write_bytes(b"nonsense")
    with pytest.raises(BadInput, match="is not a calibration"):
        Calibration.load(tmp_path / "broken")


def test_what_is_made_of_a_calibration_is_made_once_until_that_changes():
    engine, made = {}, []

    def make():
        made.append(len(made))
        return made[-1]

    first, second = {"x": torch.zeros(1)}, {"x": torch.zeros(1)}
    found = [made_once(engine, "a", learned, make) for learned in (first, first, second, second)]
    assert found == [0, 0, 1, 1]
    assert made_once(engine, "b", second, make) == 2
