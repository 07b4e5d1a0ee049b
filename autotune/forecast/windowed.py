"""The scheduler of an engine whose sequences keep their first and latest tokens (StreamingLLM)."""

from __future__ import annotations

from kvtune.autotune.forecast.gapped import GappedScheduler
from kvtune.engines.simulated import scheduler as engine
from kvtune.engines.simulated.blocks import BlockPool
from kvtune.policies.sink_window import SinkWindow


class WindowedScheduler(GappedScheduler):
    """A prompt is admitted by the most pages that it holds at a time.

    Others may use the blocks of a sequence's first tokens, up to those that were computed with
    something missing.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        limits: engine.Limits,
        sink_window: SinkWindow,
        in_flight_tokens: int,
    ) -> None:
        super().__init__(pool, block_tokens, limits)
        self._kept = sink_window
        self._most = sink_window.blocks_per_request(in_flight_tokens)

    def _gap(self, sequence: engine.Sequence) -> tuple[int, int]:
        return self._kept.dropped_blocks(sequence.computed_tokens)

    def _exact_tokens(self, sequence: engine.Sequence) -> int:
        return self._kept.exact_tokens

    def _most_blocks(self, sequence: engine.Sequence) -> int:
        return self._most
