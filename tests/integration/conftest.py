"""The real model that integration tests serve, whole and in part."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

SHALLOW_LAYERS = 8


@pytest.fixture(scope="session")
def model():
    path = os.environ.get("KVTUNE_TEST_MODEL")
    if not path:
        pytest.fail("set KVTUNE_TEST_MODEL to a checkpoint directory, or run: make integration")
    return path


@pytest.fixture(scope="session")
def shallow(model, tmp_path_factory):
    """The first `SHALLOW_LAYERS` of the model's 30, which compute as exactly, and much sooner."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("model") / "shallow"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = SHALLOW_LAYERS
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        name: weight
        for path in Path(model).glob("*.safetensors")
        for name, weight in load_file(path).items()
        if not (layer := re.match(r"model\.layers\.(\d+)\.", name))
        or int(layer[1]) < SHALLOW_LAYERS
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
