"""What a workload looks like, in one pass and in memory that does not grow with it."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvtune.errors import BadInput
from kvtune.profilers.prefix_reuse import TRACKED_BLOCKS, PrefixReuse
from kvtune.types import Histogram, Request, WorkloadFingerprint

BLOCK_SIZES = (16, 32, 64, 128, 256, 512)
EXACT_BITS = 14


def fingerprint(
    requests: Iterable[Request],
    block_sizes: Sequence[int] = BLOCK_SIZES,
    *,
    count_tokens: Callable[[str], Sequence[int]] | None = None,
    tracked_blocks: int = TRACKED_BLOCKS,
) -> WorkloadFingerprint:
    """Describe a stream of requests, in arrival order, without its text.

    Input lengths and shared prefixes of text are known only through `count_tokens`, which turns a
    text into its token ids; without it, requests with a prompt or messages count in neither. A chat
    is taken as the roles and contents of its messages one after the other, which leaves out what
    the chat template adds.

    `reusable_prefix_share` covers the requests whose tokens or prefix blocks are known, and is
    empty if there are none; `shared_prefix_tokens` is None then. The share is exact up to
    `tracked_blocks` distinct blocks; beyond that it is an unbiased estimate from a sample of them,
    and `sampled` is true.

    Duration, rate and burstiness are unknown unless every request has an arrival time. The rate is
    that of the gaps between requests.

    Raises:
        BadInput: a block size below 1, or requests that are not in arrival order.
    """
    if not block_sizes or min(block_sizes) < 1:
        raise BadInput(
            f"block sizes must be at least 1 token, got {tuple(block_sizes)}",
            f"Use for example {BLOCK_SIZES}.",
        )
    inputs, outputs, arrivals = _Lengths(), _Lengths(), _Arrivals()
    reuse = PrefixReuse(block_sizes, tracked_blocks)
    digest = _Digest()
    count = 0
    for request in requests:
        count += 1
        digest.add(request)
        arrivals.add(request.arrival_s)
        if request.output_tokens is not None:
            outputs.add(request.output_tokens)
        token_ids = _token_ids(request, count_tokens)
        if token_ids is not None:
            inputs.add(len(token_ids))
            reuse.add_tokens(token_ids)
        elif request.input_tokens is not None:
            inputs.add(request.input_tokens)
            if request.prefix_block_tokens:
                reuse.add_blocks(
                    request.prefix_blocks, request.prefix_block_tokens, request.input_tokens
                )
    return WorkloadFingerprint(
        requests=count,
        input_tokens=inputs.histogram(),
        output_tokens=outputs.histogram(),
        duration_s=arrivals.duration_s,
        request_rate_per_s=arrivals.rate_per_s,
        burstiness=arrivals.burstiness,
        reusable_prefix_share=reuse.shares(),
        shared_prefix_tokens=reuse.common_tokens,
        sampled=reuse.sampled,
        digest=digest.hex(),
    )


def _token_ids(
    request: Request, count_tokens: Callable[[str], Sequence[int]] | None
) -> Sequence[int] | None:
    if request.token_ids is not None:
        return request.token_ids
    if count_tokens is None:
        return None
    if request.prompt is not None:
        return count_tokens(request.prompt)
    if request.messages is not None:
        return count_tokens(
            "".join(
                f"{m.get('role')}\n{_content_text(m.get('content'))}\n" for m in request.messages
            )
        )
    return None


def _content_text(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


class _Lengths:
    """Counts of lengths in tokens, kept to 14 significant bits.

    So lengths below 16,384 are exact, longer ones are rounded down by less than 0.013 %, and there
    are at most some 120,000 different ones. The mean is exact.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._sum = 0

    def add(self, length: int) -> None:
        shift = max(0, length.bit_length() - EXACT_BITS)
        self._counts[length >> shift << shift] += 1
        self._sum += length

    def histogram(self) -> Histogram | None:
        """Bins at 0, 1 and powers of two; percentiles are interpolated between ranks."""
        if not self._counts:
            return None
        lengths = sorted(self._counts)
        bits = [length.bit_length() for length in lengths]
        bins = [0] * (bits[-1] - bits[0] + 1)
        for length, bit in zip(lengths, bits, strict=True):
            bins[bit - bits[0]] += self._counts[length]
        total = sum(bins)
        p50, p95, p99 = (self._percentile(lengths, q * (total - 1)) for q in (0.5, 0.95, 0.99))
        return Histogram(
            edges=tuple(float(1 << bit >> 1) for bit in range(bits[0], bits[-1] + 2)),
            counts=tuple(bins),
            mean=self._sum / total,
            p50=p50,
            p95=p95,
            p99=p99,
        )

    def _percentile(self, lengths: Sequence[int], rank: float) -> float:
        below = self._at_rank(lengths, math.floor(rank))
        above = self._at_rank(lengths, math.ceil(rank))
        return below + (above - below) * (rank - math.floor(rank))

    def _at_rank(self, lengths: Sequence[int], rank: int) -> int:
        for length in lengths:
            rank -= self._counts[length]
            if rank < 0:
                break
        return length


class _Arrivals:
    """Mean and deviation of inter-arrival times (Welford's method)."""

    def __init__(self) -> None:
        self._known = True
        self._first_s: float | None = None
        self._last_s = 0.0
        self._gaps = 0
        self._mean_s = 0.0
        self._squares = 0.0

    def add(self, arrival_s: float | None) -> None:
        if arrival_s is None:
            self._known = False
        elif self._first_s is None:
            self._first_s = self._last_s = arrival_s
        else:
            self._add_gap(arrival_s - self._last_s)
            self._last_s = arrival_s

    def _add_gap(self, gap_s: float) -> None:
        if gap_s < 0:
            raise BadInput(
                f"requests are not in arrival order: one arrives {-gap_s:g} s before the last",
                "Sort them by arrival time.",
            )
        self._gaps += 1
        delta_s = gap_s - self._mean_s
        self._mean_s += delta_s / self._gaps
        self._squares += delta_s * (gap_s - self._mean_s)

    @property
    def duration_s(self) -> float | None:
        if not self._known or self._first_s is None:
            return None
        return self._last_s - self._first_s

    @property
    def rate_per_s(self) -> float | None:
        return self._gaps / self.duration_s if self.duration_s else None

    @property
    def burstiness(self) -> float | None:
        if not self.duration_s or self._gaps < 2:
            return None
        return math.sqrt(self._squares / self._gaps) / self._mean_s


class _Digest:
    """First 16 hex digits of SHA-256 over the requests, one JSON line each."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._encode = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode

    def add(self, request: Request) -> None:
        fields = (
            request.arrival_s,
            request.prompt,
            request.messages,
            request.token_ids,
            request.input_tokens,
            request.output_tokens,
            request.prefix_blocks,
            request.prefix_block_tokens,
            request.conversation,
        )
        self._hash.update(self._encode(fields).encode() + b"\n")

    def hex(self) -> str:
        return self._hash.hexdigest()[:16]
