"""Requests as a simulation needs them: lengths, when they come, and which of them begin alike."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtune.engines.simulated.blocks import prefix_hashes
from kvtune.profilers.load.arrivals import ClosedLoop, OpenLoop
from kvtune.profilers.materialize import materialize
from kvtune.profilers.measure import LoadPlan
from kvtune.types import Request, RequestRecord

CHARACTERS_PER_TOKEN = 4.0
"""Of English text under common tokenizers, where no answer of the server said how many tokens."""


@dataclass(slots=True)
class SimulatedRequest:
    """A prompt of `prompt_tokens` tokens that is answered with `output_tokens`.

    `content` stands for the prompt's tokens: two prompts share as long a prefix as their contents
    do. `due_s` is when it is to be sent, in seconds since the start.
    """

    prompt_tokens: int
    output_tokens: int
    content: Sequence[int] = ()
    due_s: float = 0.0
    _hashes: dict[int, list[int]] = field(default_factory=dict)

    def hashes(self, block_tokens: int) -> list[int]:
        """Hashes of the prompt's full blocks, a list of its own for each caller."""
        if block_tokens not in self._hashes:
            known = self.content[: self.prompt_tokens]
            self._hashes[block_tokens] = prefix_hashes(known, block_tokens)
        return list(self._hashes[block_tokens])


def simulated_requests(
    requests: Sequence[Request],
    plan: LoadPlan,
    records: Sequence[RequestRecord],
    *,
    max_model_len_tokens: int | None,
) -> list[SimulatedRequest]:
    """The requests that a run completed, in the order in which they were sent.

    `records` are those of the run, whose indices count the requests that fit the model's context,
    and whose lengths are the true ones. Texts are cut into pieces of as many characters as a token
    has on average, so that texts that begin alike share prefixes about as their tokens do.
    """
    made = materialize(
        requests,
        vocab_size=plan.vocab_size,
        max_model_len_tokens=max_model_len_tokens,
        salt=0,
        default_output_tokens=plan.default_output_tokens,
    ).requests
    answered = {record.index: record for record in records if record.ok}
    width = _characters_per_token(made, answered)
    ids: dict[str, int] = {}
    found = []
    for index, request in enumerate(made):
        record = answered.get(index)
        if record is None:
            continue
        text = _text(request)
        if request.token_ids is not None:
            content: Sequence[int] = request.token_ids
        else:
            content = [
                ids.setdefault(text[round(width * at) : round(width * (at + 1))], len(ids))
                for at in range(int(len(text) / width))
            ]
        found.append(
            SimulatedRequest(
                prompt_tokens=record.input_tokens or max(len(content), 1),
                output_tokens=record.output_tokens,
                content=content,
                due_s=request.arrival_s or 0.0,
            )
        )
    return _in_order(found, plan.arrivals)


def shuffled(requests: Sequence[SimulatedRequest], reach: int, seed: int) -> list[SimulatedRequest]:
    """The requests in another order, none further than `reach` places from its own.

    Times stay where they are, so that it is other requests that come at them. Seed 0 is the order
    given.
    """
    if seed == 0:
        return list(requests)
    numbers = random.Random(seed)
    order = sorted(range(len(requests)), key=lambda at: at + numbers.uniform(0, reach))
    return [
        SimulatedRequest(
            prompt_tokens=requests[source].prompt_tokens,
            output_tokens=requests[source].output_tokens,
            content=requests[source].content,
            due_s=requests[place].due_s,
        )
        for place, source in enumerate(order)
    ]


def _in_order(
    requests: list[SimulatedRequest], arrivals: OpenLoop | ClosedLoop
) -> list[SimulatedRequest]:
    if isinstance(arrivals, ClosedLoop):
        for request in requests:
            request.due_s = 0.0
        return requests
    requests.sort(key=lambda request: request.due_s)
    first_s = requests[0].due_s if requests else 0.0
    for request in requests:
        request.due_s = (request.due_s - first_s) * arrivals.time_scale
    return requests


def _characters_per_token(
    requests: Sequence[Request], answered: Mapping[int, RequestRecord]
) -> float:
    characters = tokens = 0
    for index, record in answered.items():
        if index < len(requests) and record.input_tokens and (text := _text(requests[index])):
            characters += len(text)
            tokens += record.input_tokens
    return characters / tokens if tokens else CHARACTERS_PER_TOKEN


def _text(request: Request) -> str:
    if request.messages is not None:
        return "".join(json.dumps(dict(message), sort_keys=True) for message in request.messages)
    return request.prompt or ""
