"""Made-up workloads: lengths, arrivals and shared prefixes from a few numbers and a seed."""

from __future__ import annotations

import heapq
import math
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from kvtune.errors import BadInput
from kvtune.profilers.traces.base import MAX_TOKENS
from kvtune.types import Request

PREFIX_BLOCK_TOKENS = 16
_IDS_BITS = 24

Draw = Callable[[Random], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSpec:
    """A workload to make up.

    - `requests`: how many in all.
    - `input_tokens`: a request's own prompt tokens, after the shared prefix and the history.
    - `output_tokens`: how many are generated.
    - `arrival`: how requests arrive; `None` for no arrival times.
    - `shared_prefixes`: how many different prefixes (system prompts) there are, each of
      `prefix_tokens` (a multiple of 16); `prefix_skew` makes the k-th one k**-skew as frequent as
      the first (Zipf's law; 0 is uniform).
    - `turns`: requests in a conversation, each carrying the prompts and answers before it, spaced
      by `turn_gap_s`. Without arrival times conversations are interleaved as if one began each
      second. The first `turns * turn_gap_s` seconds have fewer requests, until conversations
      begin and end at the same rate; the last conversations are cut off.

    Lengths are written `512`, `uniform:100-800`, `lognormal:512,0.6` (median, sigma) or
    `choice:128,2048`; arrivals `poisson:2.5` (requests/s), `gamma:2.5,0.5` (requests/s, shape; a
    shape below 1 is burstier than Poisson) or `constant:4`.

    Raises:
        BadInput: a value that cannot be used.
    """

    requests: int
    input_tokens: str = "512"
    output_tokens: str = "128"
    arrival: str | None = None
    shared_prefixes: int = 0
    prefix_tokens: int = 0
    prefix_skew: float = 0.0
    turns: int = 1
    turn_gap_s: float = 10.0

    def __post_init__(self) -> None:
        for name, minimum in (("requests", 1), ("shared_prefixes", 0), ("turns", 1)):
            if getattr(self, name) < minimum:
                raise BadInput(f"{name} must be at least {minimum}, got {getattr(self, name)}")
        for name in ("prefix_skew", "turn_gap_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise BadInput(f"{name} must be a number from 0, got {value}")
        if not 0 <= self.prefix_tokens <= MAX_TOKENS or self.prefix_tokens % PREFIX_BLOCK_TOKENS:
            raise BadInput(
                f"prefix_tokens must be a multiple of {PREFIX_BLOCK_TOKENS} from 0, "
                f"got {self.prefix_tokens}",
                f"Use for example {max(0, round(self.prefix_tokens / 16)) * 16}.",
            )
        if bool(self.shared_prefixes) != bool(self.prefix_tokens):
            raise BadInput(
                f"shared_prefixes ({self.shared_prefixes}) and prefix_tokens "
                f"({self.prefix_tokens}) go together",
                "Give both, or neither.",
            )
        parse_lengths("input_tokens", self.input_tokens)
        parse_lengths("output_tokens", self.output_tokens)
        parse_arrival(self.arrival)


def parse_lengths(name: str, text: str) -> Draw:
    """Parse a distribution of lengths; draws are whole numbers of tokens from 1.

    Raises:
        BadInput: naming `name`, the text, and an example.
    """
    kind, values = _parts(text, "constant")
    try:
        if kind == "uniform" and len(values) == 1:
            low, high = (int(value) for value in values[0].split("-"))
            if 1 <= low <= high <= MAX_TOKENS:
                return lambda random: random.randint(low, high)
        elif kind == "lognormal":
            median, sigma = (float(value) for value in values)
            if 1 <= median <= MAX_TOKENS and 0 <= sigma <= 10:
                mu = math.log(median)
                return lambda random: _tokens(math.exp(mu + sigma * random.gauss(0.0, 1.0)))
        elif kind == "choice" or (kind == "constant" and len(values) == 1):
            options = [int(value) for value in values]
            if all(1 <= option <= MAX_TOKENS for option in options):
                return lambda random: random.choice(options)
    except ValueError:
        pass
    raise BadInput(
        f"{name} cannot be {text!r}",
        "Write 512, uniform:100-800, lognormal:512,0.6 (median, sigma) or choice:128,2048.",
    )


def parse_arrival(text: str | None) -> Draw | None:
    """Parse an arrival process; draws are gaps between requests in seconds.

    Raises:
        BadInput: naming the text and an example.
    """
    if text is None or text == "none":
        return None
    kind, values = _parts(text, "")
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        numbers = []
    if numbers and all(math.isfinite(number) and number > 0 for number in numbers):
        rate_per_s = numbers[0]
        if kind == "constant" and len(numbers) == 1:
            return lambda random: 1 / rate_per_s
        if kind == "poisson" and len(numbers) == 1:
            return lambda random: random.expovariate(rate_per_s)
        if kind == "gamma" and len(numbers) == 2:
            shape = numbers[1]
            return lambda random: random.gammavariate(shape, 1 / (rate_per_s * shape))
    raise BadInput(
        f"the arrival process cannot be {text!r}",
        "Write none, constant:4, poisson:2.5 (requests/s) or gamma:2.5,0.5 (requests/s, shape).",
    )


def make_requests(spec: SyntheticSpec, seed: int) -> Iterator[Request]:
    """Make the requests of `spec`, in arrival order; the same seed makes the same ones.

    Shared tokens are named by ids of blocks of 16 tokens, so that a prefix is really shared once
    the requests are materialized.
    """
    random = Random(seed)
    gap = parse_arrival(spec.arrival)
    timed = gap is not None
    new = _Conversations(spec, random)
    start_s = 0.0
    waiting: list[tuple[float, int, _Conversation]] = []
    for _ in range(spec.requests):
        if waiting and waiting[0][0] < start_s:
            time_s, number, conversation = heapq.heappop(waiting)
        else:
            time_s, number, conversation = start_s, new.count, new.begin()
            start_s += gap(random) * spec.turns if gap else 1.0
        yield conversation.turn(round(time_s, 6) if timed else None)
        if conversation.turns_left:
            heapq.heappush(waiting, (time_s + spec.turn_gap_s, number, conversation))


class _Conversations:
    """Begins conversations: each with its own block ids, after those of a shared prefix."""

    def __init__(self, spec: SyntheticSpec, random: Random) -> None:
        self.count = 0
        self._spec = spec
        self._random = random
        self._draw_input = parse_lengths("input_tokens", spec.input_tokens)
        self._draw_output = parse_lengths("output_tokens", spec.output_tokens)
        self._cumulative = list(
            accumulate((k + 1) ** -spec.prefix_skew for k in range(spec.shared_prefixes))
        )

    def begin(self) -> _Conversation:
        spec = self._spec
        prefix: range = range(0)
        if self._cumulative:
            drawn = bisect(self._cumulative, self._random.random() * self._cumulative[-1])
            first_id = min(drawn, spec.shared_prefixes - 1) << _IDS_BITS
            prefix = range(first_id, first_id + spec.prefix_tokens // PREFIX_BLOCK_TOKENS)
        number = self.count
        self.count += 1
        return _Conversation(
            random=self._random,
            draw_input=self._draw_input,
            draw_output=self._draw_output,
            name=f"c{number}" if spec.turns > 1 else None,
            blocks=list(prefix),
            next_id=(spec.shared_prefixes + number) << _IDS_BITS,
            tokens=spec.prefix_tokens,
            turns_left=spec.turns,
        )


@dataclass(slots=True)
class _Conversation:
    """The state between turns; `tokens` is the length of the history."""

    random: Random
    draw_input: Draw
    draw_output: Draw
    name: str | None
    blocks: list[int]
    next_id: int
    tokens: int
    turns_left: int

    def turn(self, arrival_s: float | None) -> Request:
        input_tokens = self.tokens + int(self.draw_input(self.random))
        output_tokens = int(self.draw_output(self.random))
        if self.name is not None:
            new = input_tokens // PREFIX_BLOCK_TOKENS - len(self.blocks)
            self.blocks += range(self.next_id, self.next_id + new)
            self.next_id += new
        self.tokens = input_tokens + output_tokens
        self.turns_left -= 1
        return Request(
            arrival_s=arrival_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            prefix_blocks=tuple(self.blocks),
            prefix_block_tokens=PREFIX_BLOCK_TOKENS,
            conversation=self.name,
        )


def _parts(text: str, default_kind: str) -> tuple[str, list[str]]:
    kind, colon, values = text.partition(":")
    return (kind.strip(), values.split(",")) if colon else (default_kind, [text])


def _tokens(length: float) -> int:
    return max(1, min(MAX_TOKENS, round(length)))
