"""Models for regimes that no real small model shows, and parts of one that are sooner computed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SHAPES: Mapping[str, Mapping[str, int]] = {
    "wide": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
    },
    "half": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "keys": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 64,
    },
    "deep keys": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}
"""Llamas with the vocabulary of the tokenizer, whose head shares the embedding; of two layers where
nothing else is said."""

_MAKE = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

shape, tokenizer, folder = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
known = json.load(open(tokenizer + "/config.json"))
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
config = LlamaConfig(
    tie_word_embeddings=True,
    vocab_size=known["vocab_size"], max_position_embeddings=4096, dtype="bfloat16",
    bos_token_id=known["bos_token_id"], eos_token_id=known["eos_token_id"],
    **{"num_hidden_layers": 2, **shape},
)
LlamaForCausalLM(config).save_pretrained(folder)
"""


_CUT = """
import re, sys
from pathlib import Path
from safetensors.torch import load_file, save_file

layers, model, target = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
kept = {
    name: weight
    for path in sorted(model.glob("*.safetensors"))
    for name, weight in load_file(path).items()
    if not (layer := re.match(r"model\\.layers\\.([0-9]+)\\.", name)) or int(layer[1]) < layers
}
save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
"""


def cut_model(model: Path, layers: int, folder: Path) -> Path:
    """Write the first layers of a checkpoint, unless they are there; returns their folder."""
    target = folder / f"{model.name}-{layers}-layers"
    if (target / "model.safetensors").exists():
        return target
    shutil.copytree(
        model, target, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True
    )
    config = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    subprocess.run(
        [sys.executable, "-c", _CUT, str(layers), str(model), str(target)],
        check=True,
        capture_output=True,
    )
    return target


def make_model(name: str, tokenizer: Path, folder: Path) -> Path:
    """Write the model of that name with the tokenizer of another checkpoint, unless it is there.

    Returns its folder.
    """
    target = folder / name
    if (target / "model.safetensors").exists():
        return target
    target.mkdir(exist_ok=True)
    # In a process of its own: torch keeps the memory that it once took.
    arguments = [json.dumps(SHAPES[name]), str(tokenizer), str(target)]
    subprocess.run([sys.executable, "-c", _MAKE, *arguments], check=True, capture_output=True)
    for file in tokenizer.iterdir():
        if "token" in file.name or file.name in ("vocab.json", "merges.txt", "chat_template.jinja"):
            shutil.copy(file, target)
    return target
