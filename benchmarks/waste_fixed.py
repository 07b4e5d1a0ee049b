"""kvtune without its rule for ending a search early: its command line, as it is otherwise.

python benchmarks/waste_fixed.py search ...
"""

from __future__ import annotations

from kvtune.autotune.cli.app import main
from kvtune.autotune.explore.proposer import ModelProposer


def _never(*_: object, **__: object) -> str:
    return ""


if __name__ == "__main__":
    ModelProposer.stop = _never  # type: ignore[method-assign]
    main()
