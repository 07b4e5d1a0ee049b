"""StreamingLLM: keep the first tokens and the latest ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kvtune.lazy import lazy_import
from kvtune.policies.eviction import Evictor, EvictorContext, Seen, choose_tokens
from kvtune.policies.method import (
    REFERENCE,
    Axis,
    History,
    LayerShape,
    Paper,
    Saves,
    Serving,
    TokenMethod,
)
from kvtune.types import Harm

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


class StreamingLLM(TokenMethod):
    """Keep the first `sink_tokens` and the last `window_tokens` of a sequence.

    The same tokens in all heads. With `positions: compact`, as in the paper, keys are stored before
    RoPE and survivors count as 0 to n - 1, so that a text may outgrow the context that a model was
    trained for; with `keep` they stay where they were. A prompt attends to itself in full at its
    own positions, and a later one to the survivors as generated tokens do. Protected tokens take
    their room from the window. With proportional fairness the budget is shared among spans, each
    keeping its latest tokens; the sinks are those of the whole prompt.

    Tokens are dropped after a step's attention: a step reads the kept tokens and its own.
    """

    name = "streaming-llm"
    title = "StreamingLLM"
    axis = Axis.TOKEN
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "both"
    serving = (
        REFERENCE,
        Serving(
            "kvtune-plugin",
            "vLLM 0.32, --additional-config.kvtune.streaming_llm",
            platforms=("cpu",),
        ),
    )
    paper = Paper("Efficient Streaming Language Models with Attention Sinks", "2309.17453", 2023)
    summary = (
        "Holds the first and the latest tokens, so that memory never grows; everything in between "
        "is forgotten."
    )

    sink_tokens: int = Field(default=4, ge=0)
    window_tokens: int = Field(default=2000, ge=1)
    positions: Literal["compact", "keep"] = "compact"

    @property
    def heads(self) -> Literal["uniform", "per-head", "ragged"]:
        """All heads keep the same tokens."""
        return "uniform"

    @property
    def position_mode(self) -> Literal["keep", "compact"]:
        """As `positions`."""
        return self.positions

    @property
    def publish(self) -> Literal["plain", "fingerprint", "never"]:
        """Only kept positions can be shared, and only among sequences with the same parameters.

        In keep mode the vectors of a token depend on what precedes it and on the parameters (once
        tokens are gone, later ones attended to sinks and window only), never on what follows. They
        are those of the full cache as long as nothing was dropped before they were made; the key
        cannot tell, so all are shared under the fingerprint. In compact mode a token's rotation
        changes whenever one before it goes, and with fairness what goes depends on how long the
        other spans become.
        """
        if self.positions == "compact" or self.fairness != "none":
            return "never"
        return "fingerprint"

    @property
    def budget_tokens(self) -> int:
        """Tokens kept: sinks and window."""
        return self.sink_tokens + self.window_tokens

    def evictor(self, ctx: EvictorContext) -> Evictor:
        """Build the choice, which holds nothing."""
        return _SinksAndWindow(self)

    def history(self, seen: History, layer: LayerShape) -> History:
        """All tokens up to the budget."""
        return seen if seen.tokens <= self.budget_tokens else History(self.budget_tokens)

    def own_bytes(self, seen: History, layer: LayerShape) -> int:
        """No scores: 0. The engine counts 4 B of position a token, for all heads together."""
        return 0


class _SinksAndWindow(Evictor):
    def __init__(self, method: StreamingLLM) -> None:
        self.method = method

    def observe(self, seen: Seen, phase: Literal["prefill", "decode", "scoring"]) -> None:
        """Nothing: only positions count."""

    def select(self, seen: Seen, phase: Literal["prefill", "decode"]) -> Tensor | None:
        held = seen.key_positions.shape[1]
        if held <= self.method.budget_tokens:
            return None
        # All heads hold the same tokens, so that any row of positions stands for all.
        positions = seen.key_positions[:1]
        forced = (positions < self.method.sink_tokens) | seen.protected()[:1]
        forced[:, -1] = True
        recency = torch.arange(held, device=positions.device)[None]
        return choose_tokens(
            recency,
            self.method.budget_tokens,
            forced=forced,
            positions=positions,
            spans=seen.ctx.spans,
            fairness=self.method.fairness,
        )
