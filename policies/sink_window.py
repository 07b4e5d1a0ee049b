"""Which pages StreamingLLM keeps of a request, in whole pages of the engine's cache.

Xiao et al., 2024: the first few tokens (sinks) take up attention that goes nowhere else, so a model
stays fluent on them and the latest tokens alone. Here a step that begins with `computed` tokens in
the cache reads the sinks' pages, and from the page of token `computed - window_tokens` on.

Everything that sizes, frees, reads or forecasts takes these numbers, so that none can differ.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SinkWindow:
    """Sinks and window over pages of `block_tokens`; all in tokens, all rounded up to pages."""

    sink_tokens: int
    window_tokens: int
    block_tokens: int

    @property
    def sink_blocks(self) -> int:
        """How many pages at the start of a request stay."""
        return -(-self.sink_tokens // self.block_tokens)

    def dropped_blocks(self, computed_tokens: int) -> tuple[int, int]:
        """The pages [first, end) that a step after `computed_tokens` does without."""
        first = self.sink_blocks
        return first, max(first, (computed_tokens - self.window_tokens) // self.block_tokens)

    @property
    def exact_tokens(self) -> int:
        """How many first tokens of a request are always computed with all that precede them.

        A step that computes token `t` begins at or before it, and drops nothing while it begins
        before the window has left the page behind the sinks.
        """
        return (self.sink_blocks + 1) * self.block_tokens + self.window_tokens

    def blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int | None = None
    ) -> int:
        """The most pages that a request holds at a time, of a length up to `max_model_len`.

        `max_in_flight_tokens`: the most that may be scheduled and not yet settled; pages leave by
        what is settled. One page more than window and flight fill, as both may begin inside one.
        """
        moving = -(-(self.window_tokens + max_in_flight_tokens) // self.block_tokens)
        most = self.sink_blocks + moving + 1
        if max_model_len is None:
            return most
        return min(most, -(-max_model_len // self.block_tokens))
