"""What a search may spend, and what it may try."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path

from pydantic import JsonValue

from kvtune.profilers.quality.limits import Limit, limit_text
from kvtune.profilers.quality.suite import Size
from kvtune.types import Harm

ENOUGH = 0.02
"""The share of the best objective that a search's choice may be expected to lack when it ends."""


class Sampler(StrEnum):
    """Who says what to try: a model of what was measured, Optuna's TPE, or whichever suits."""

    AUTO = "auto"
    MODEL = "model"
    TPE = "tpe"


class Also(StrEnum):
    """What may be wanted beside the goal's own objective; less is better.

    The mean KL divergence of answers from stock ones, and the bytes of the KV pool.
    """

    QUALITY = "quality"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be spent. `trials` counts the baseline and not the confirmation,
    which ends before `confirm_rounds` if its outcome is clear.

    `probe_s` is for a probe of the baseline's server, 0 for none.
    """

    trials: int
    time_s: float | None = None
    finalists: int = 2
    confirm_rounds: int = 8
    repeats: int = 1
    probe_s: float = 0.0

    @property
    def probe_limit_s(self) -> float:
        """The time for a probe: no more than a tenth of all of it."""
        return self.probe_s if self.time_s is None else min(self.probe_s, self.time_s / 10)


@dataclass(frozen=True, slots=True)
class QualityRules:
    """What a configuration may do to answers; without `limits`, each suite's own margins count.

    Every trial that may change answers is asked a screen, and a finalist has to pass at `size`. A
    screen has too few items to prove most limits: as `size`, it recommends next to nothing. `data`
    is a file of the user's own questions, which are asked too.
    """

    limits: tuple[Limit, ...] = ()
    size: Size = Size.STANDARD
    data: str | None = None

    def settings(self) -> dict[str, JsonValue]:
        """The rules as settings of a study, the same in whatever order limits were given.

        Of data, what they hold counts, and not where they lie.

        Raises:
            OSError: the file cannot be read.
        """
        found: dict[str, JsonValue] = {
            "limits": [*sorted(map(limit_text, self.limits))],
            "size": self.size.value,
        }
        if self.data is not None:  # Without, a study is what it was before there were any.
            found["data"] = sha256(Path(self.data).read_bytes()).hexdigest()
        return found


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be tried: the worst harm, and whether harm waits until it is needed.

    Without `quality`, only the long-prompt canary looks at answers. Without `early_stop`, a trial
    that turns out hopeless is measured to its end; so it is with `also`: what is hopeless by the
    goal's own objective may be the best by another one. `max_host_bytes` is the most host memory
    that a setting may take beside the KV pool; without, policies set their own bounds. `enough` is
    the expected loss, as a share of the best, at which a search ends before its budget; 0: at none.
    """

    max_harm: Harm = Harm.NEAR_LOSSLESS
    explore_lossy: bool = False
    seed: int = 0
    remeasure: bool = False
    quality: QualityRules | None = None
    early_stop: bool = True
    sampler: Sampler = Sampler.AUTO
    also: tuple[Also, ...] = ()
    max_host_bytes: int | None = None
    enough: float = ENOUGH

    @property
    def may_cut(self) -> bool:
        """Whether a trial may be given up before its end."""
        return self.early_stop and not self.also
