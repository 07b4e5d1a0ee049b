"""The model with more than one objective: its trials spread over the front."""

import math
import random
from dataclasses import replace
from statistics import median

import pytest
from contracts.surfaces import CTX, Surface

from kvtune.autotune.explore.proposer import ModelProposer
from kvtune.autotune.limits import Also

FORMAT, BLOCK, WIDTH = "kv_cache_dtype", "block_size", "max_num_seqs"
KL = {"auto": 0.0, "fp8": 0.01, "fp8_e5m2": 0.03}
FASTER = {"auto": 0.0, "fp8": 0.25, "fp8_e5m2": 0.45}
"""Each further loss of answers buys speed, so the best of each format is on the front."""


def made(noise=0.04):
    """What helps one format helps the others."""
    formats = dict(enumerate(KL))

    def log_rate(at):
        return FASTER[formats[round(at[FORMAT])]] - 0.8 * at[BLOCK] - abs(at[WIDTH] - 0.55)

    return Surface(log_rate, told=log_rate, names=(BLOCK, WIDTH, FORMAT), noise=noise)


def format_of(arguments):
    return arguments.get("kv-cache-dtype", "auto")


def found_of_each_format(trials, also, seed):
    """By format, the best true objective of what was tried as a share of the best there is."""
    surface, numbers = made(), random.Random(seed)
    proposer = ModelProposer(surface.goal, seed=seed, also=also)
    tried = [{}]
    for trial in range(trials):
        if trial:
            left = {"seconds_left": math.inf, "trials_left": trials - trial}
            tried.append(proposer.pick(surface.space, CTX, **left).stack.arguments)
        seen = surface.observe(tried[-1], numbers, 20.0 * trial)
        proposer.observe(replace(seen, costs={"quality": KL[format_of(tried[-1])]}))
    found = dict.fromkeys(KL, 0.0)
    best = dict.fromkeys(KL, 0.0)
    for arguments in tried:
        name = format_of(arguments)
        found[name] = max(found[name], surface.truth(arguments))
    for one in surface.points:
        name = format_of(one.stack.arguments)
        best[name] = max(best[name], surface.truth(one.stack.arguments))
    return {name: found[name] / best[name] for name in KL}


def worst_of_front(trials, also, seed):
    return min(found_of_each_format(trials, also, seed).values())


def test_in_20_trials_most_of_the_best_of_every_part_of_the_front_is_found():
    both = median(worst_of_front(20, (Also.QUALITY,), seed) for seed in range(3))
    assert both >= 0.97
    alone = median(worst_of_front(20, (), seed) for seed in range(3))
    assert alone < both, "by one objective alone, trials go to the fastest format"


def test_equal_seeds_and_observations_give_equal_trials():
    first, again = (found_of_each_format(6, (Also.QUALITY,), 4) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("also", [(), (Also.QUALITY,)])
def test_no_trial_is_needless_where_each_may_show_another_part_of_the_front(also):
    surface, numbers = made(0.01), random.Random(0)
    proposer = ModelProposer(surface.goal, also=also, foretell=surface.foretell)
    order = sorted(surface.points, key=lambda one: -surface.truth(one.stack.arguments))
    for arguments in ({}, *(one.stack.arguments for one in order[:13])):
        seen = surface.observe(arguments, numbers)
        proposer.observe(replace(seen, costs={"quality": KL[format_of(arguments)]}))
    why = proposer.stop(surface.space, CTX)
    assert (why == "") is bool(also)
