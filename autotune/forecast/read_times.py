"""Time to read a cached token under a number format: what trials here measured, else a guess.

All times are ratios (least, expected, most) to what reading took before.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtune.autotune.forecast.experience import MeasuredRead
from kvtune.autotune.forecast.system import FULL
from kvtune.policies.base import Context
from kvtune.policies.kv_dtype import FP8

Times = tuple[float, float, float]

UNCHANGED: Times = (1.0, 1.0, 1.0)
GUESS = "a guess, no trial here measured it"
MEASURED_ONCE = "as one CPU had it, no trial here measured it"

FP8_ON_CPU: Times = (0.8, 1.0, 1.25)
"""Of 8 bits over 16 on a CPU: the bytes are half, and converting them costs about what that saves.
What decode steps took on one quiet machine (docs/verdicts.md) comes to 0.87 for 32 KV heads and
1.15 for 3."""

EIGHT_BITS_ON_GPU: Times = (0.5, 0.8, 1.25)
"""The same on a GPU. At best the bytes decide. Users measured decode steps that were 0.4% to 5.5%
shorter (vLLM issue 42058, fp8 on an A100), and longer ones (48786, on Hopper)."""

FOUR_BITS_ON_GPU: Times = (0.25, 0.9, 2.0)
"""Of formats with fewer bits: about a quarter of the bytes, and more work to unpack them."""

TURBOQUANT_ON_GPU: Times = (0.25, 1.5, 7.0)
"""Of these decode steps took 7 times as long as with fp8 on an H200 (vLLM pull request 40858), and
about half as long as with 16 bits for single sequences of another model (issue 40069)."""

STORES_ON_CPU: Mapping[str, Times] = {
    "store int8": (1.8, 2.8, 5.6),
    "store int4": (5.4, 6.5, 13.0),
    "store turboquant": (4.1, 5.8, 9.1),
    "store kivi": (3.8, 6.3, 13.0),
}
"""Of stores of kvtune's plugin, whose steps read back to full precision what they attend to. One
layer with 9 heads on 3 of 64 channels in float32 was timed for four requests of 512, 1,536 and
3,072 tokens, on one core of a CPU without AVX-512 that others used too. These are the least and the
most of six ratios to stock vLLM, of the least times and of the medians (without those of medians
that others' work made large), and between them the middle of the medians."""

LEAST = 0.01
"""What reads are taken to cost at least where they are what others are compared to."""


def read_times(
    before: str, after: str, ctx: Context, reads: Mapping[str, MeasuredRead]
) -> tuple[Times, str]:
    """Time to read a token in the format `after` over that in `before`, and where it is from.

    Formats are those of `kv_format`, or methods that quantize. `reads` are what trials on the
    device measured. The source is empty where nothing changes.
    """
    if before == after or any({before, after} <= alike for alike in (FULL, frozenset(FP8))):
        return UNCHANGED, ""
    (old, old_source), (new, new_source) = (_over_full(one, ctx, reads) for one in (before, after))
    least, expected, most = (max(time, LEAST) for time in old)
    return (new[0] / most, new[1] / expected, new[2] / least), new_source or old_source


def times_by_bytes(ratio: float) -> Times:
    """Time over time where bytes are all that counts; at worst half of the saving is lost."""
    return min(ratio, (1 + ratio) / 2), ratio, max(ratio, (1 + ratio) / 2)


def _over_full(dtype: str, ctx: Context, reads: Mapping[str, MeasuredRead]) -> tuple[Times, str]:
    """Time to read a token over that in the model's own format, and where it is from."""
    if dtype in FULL:
        return UNCHANGED, ""
    if (known := reads.get(dtype)) is not None:
        return known.ratios, f"as {known.trials} trials here found"
    if dtype.startswith("store"):
        return STORES_ON_CPU[" ".join(dtype.split()[:2])], MEASURED_ONCE
    if ctx.platform == "cpu":
        return FP8_ON_CPU, GUESS
    if "turboquant" in dtype:
        return TURBOQUANT_ON_GPU, GUESS
    return EIGHT_BITS_ON_GPU if "fp8" in dtype or "int8" in dtype else FOUR_BITS_ON_GPU, GUESS
