"""A pretended engine: requests in, token times out, by a step-time model that is known."""

from dataclasses import dataclass

import numpy as np

from kvtune.types import RequestRecord


@dataclass
class Sequence:
    arrives_step: int
    input_tokens: int
    output_tokens: int


def decode(
    sequences, *, fixed_s, per_sequence_s, per_kv_token_s, prefill_s=0.0, noise=None, jitter_s=0.0
):
    """Records of `sequences`, each prefilled in one step and decoded in those that follow.

    `noise(random)` multiplies the time of a step, `jitter_s` moves single messages.
    """
    random = np.random.default_rng(len(sequences))
    now_s, step = 0.0, 0
    times = [[] for _ in sequences]
    sent_s = [None] * len(sequences)
    while any(len(got) < item.output_tokens for got, item in zip(times, sequences, strict=True)):
        here = [i for i, item in enumerate(sequences) if item.arrives_step <= step]
        new = [i for i in here if not times[i]]
        old = [i for i in here if 0 < len(times[i]) < sequences[i].output_tokens]
        resident = sum(sequences[i].input_tokens + len(times[i]) for i in old)
        duration_s = fixed_s + per_sequence_s * len(old) + per_kv_token_s * resident
        duration_s *= noise(random) if noise else 1.0
        duration_s += prefill_s * sum(sequences[i].input_tokens for i in new)
        for i in new:
            sent_s[i] = now_s
        now_s += duration_s
        step += 1
        for i in new + old:
            times[i].append(now_s + jitter_s * random.uniform())
    return [
        record(i, sent_s[i], got, item.input_tokens)
        for i, (got, item) in enumerate(zip(times, sequences, strict=True))
    ]


def record(index, sent_s, times, input_tokens, error=None):
    """The record of a request whose tokens came at `times`."""
    return RequestRecord(
        index=index,
        scheduled_s=sent_s,
        sent_s=sent_s,
        first_token_s=times[0] if times else None,
        end_s=times[-1] if times else sent_s,
        gaps_s=tuple(float(gap) for gap in np.diff(times)),
        input_tokens=input_tokens,
        output_tokens=len(times),
        requested_output_tokens=len(times),
        error=error,
    )


def cells(plan, **model):
    """The records of one run a (sequences, input tokens, output tokens) of `plan`."""
    return [
        decode([Sequence(0, inputs, outputs)] * count, **model) for count, inputs, outputs in plan
    ]
