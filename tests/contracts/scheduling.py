"""Drive a scheduler of the simulated engine to its end, and see what it held and served."""

from collections import Counter

from kvtune.engines.simulated.scheduler import Sequence


def used_blocks(pool, scheduler, prompt_tokens, output_tokens):
    """Blocks that a lone sequence holds in each step; all come back at the end."""
    scheduler.add(Sequence(0, prompt_tokens, output_tokens, []))
    seen = []
    while not scheduler.is_idle:
        step = scheduler.schedule()
        seen.append(pool.used)
        scheduler.complete(step, 0.0)
    assert pool.used == 0
    return seen


def outputs_by_sequence(scheduler, steps=5000):
    """Tokens that each sequence was answered, within so many steps."""
    found = Counter()
    for _ in range(steps):
        if scheduler.is_idle:
            break
        found.update(sequence.number for sequence in scheduler.complete(scheduler.schedule(), 0.0))
    return dict(found)
