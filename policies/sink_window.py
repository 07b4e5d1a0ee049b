"""Which pages StreamingLLM keeps of a request, in whole pages of the engine's cache.

Xiao et al., 2024: the first few tokens (sinks) take up attention that goes nowhere else, so a model
stays fluent on them and the latest tokens alone. Here the tokens of page `p` attend to the sinks'
pages, to the `window_blocks` pages before `p`, and to what precedes them within `p`. That depends
on a token's place in its request alone, so neither chunks of a prefill, nor preemption, nor the
load decides what a token sees.

Everything that sizes, frees, reads or forecasts takes these numbers, so that none can differ.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SinkWindow:
    """Sinks and window over pages of `block_tokens`; both are rounded up to whole pages."""

    sink_tokens: int
    window_tokens: int
    block_tokens: int

    @property
    def sink_blocks(self) -> int:
        """How many pages at the start of a request stay."""
        return -(-self.sink_tokens // self.block_tokens)

    @property
    def window_blocks(self) -> int:
        """How many pages before its own a token sees."""
        return -(-self.window_tokens // self.block_tokens)

    def dropped_blocks(self, computed_tokens: int) -> tuple[int, int]:
        """The pages [first, end) that nothing after `computed_tokens` tokens sees."""
        first = self.sink_blocks
        return first, max(first, computed_tokens // self.block_tokens - self.window_blocks)

    @property
    def exact_tokens(self) -> int:
        """How many first tokens of a request see all that precedes them, as in stock vLLM."""
        return (self.sink_blocks + self.window_blocks + 1) * self.block_tokens

    def blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int | None = None
    ) -> int:
        """The most pages that a request holds at a time, of a length up to `max_model_len`.

        `max_in_flight_tokens`: the most that may be scheduled and not yet settled, as pages leave
        by what is settled. One page more than it fills, as it may begin inside one.
        """
        in_flight = -(-max_in_flight_tokens // self.block_tokens)
        most = self.sink_blocks + self.window_blocks + in_flight + 1
        if max_model_len is None:
            return most
        return min(most, -(-max_model_len // self.block_tokens))
