"""YOCO: a self-decoder of windows, then layers that all read one cache (2405.05254).

No checkpoint is read here: the model has random weights and serves to show the mechanism, its
bytes, and the early exit of a prompt. RoPE is in the rotate-half layout; the self-decoder's gated
retention, the paper's other choice, is not built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from kvtune.engines.reference.attention import attend
from kvtune.errors import BadInput
from kvtune.kernels.rope import apply_rope, cos_sin


@dataclass(frozen=True, slots=True)
class YocoShape:
    """Sizes of a model, named as its config.json names them.

    The self-decoder has `n_self_heads` heads of hidden_size / n_self_heads, each with its own keys
    and values, and windows of `sliding_window` tokens.
    """

    vocab_size: int = 97
    hidden_size: int = 64
    intermediate_size: int = 96
    num_self_decoder_layers: int = 2
    num_cross_decoder_layers: int = 2
    n_self_heads: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    sliding_window: int = 8
    rope_theta: float = 10_000.0


@dataclass(slots=True)
class Rows:
    """Rotated keys and values [H, n, d] of consecutive tokens, the last at `end` - 1."""

    keys: Tensor
    values: Tensor
    end: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def positions(self) -> Tensor:
        """Positions [1, n]."""
        held = self.keys.shape[1]
        return torch.arange(self.end - held, self.end, device=self.keys.device)[None]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens."""
        self.keys = torch.cat((self.keys, keys), dim=1)
        self.values = torch.cat((self.values, values), dim=1)
        self.end += keys.shape[1]

    def slide(self, window_tokens: int) -> None:
        """Drop all but the last tokens."""
        self.keys = self.keys[:, -window_tokens:].clone()
        self.values = self.values[:, -window_tokens:].clone()


@dataclass(slots=True)
class YocoSequence:
    """What is held of one sequence: a window a self-decoder layer, and one cache for the rest.

    `token_layers` counts how many tokens went through how many layers.
    """

    windows: tuple[Rows, ...]
    shared: Rows
    token_layers: int = field(default=0)

    @property
    def tokens(self) -> int:
        """How many tokens were processed."""
        return self.shared.end

    @property
    def nbytes(self) -> int:
        """Bytes of everything held."""
        return self.shared.nbytes + sum(rows.nbytes for rows in self.windows)


class Projected(nn.Module):
    """A layer's query and output projections, its MLP, and norms before either half."""

    def __init__(self, shape: YocoShape, heads: int, dim: int) -> None:
        super().__init__()
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.heads = heads
        self.attention_norm = nn.RMSNorm(hidden)
        self.q_proj = nn.Linear(hidden, heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add what was attended to, [H, m, d], and the MLP to [m, hidden]."""
        hidden = hidden + self.o_proj(attended.transpose(0, 1).flatten(1))
        normed = self.mlp_norm(hidden)
        out: Tensor = hidden + self.down_proj(silu(self.gate_proj(normed)) * self.up_proj(normed))
        return out


class SelfLayer(Projected):
    """A layer of the self-decoder: attention within a window."""

    def __init__(self, shape: YocoShape) -> None:
        dim = shape.hidden_size // shape.n_self_heads
        super().__init__(shape, shape.n_self_heads, dim)
        self.k_proj = nn.Linear(shape.hidden_size, shape.n_self_heads * dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.n_self_heads * dim, bias=False)


class YocoModel(nn.Module):
    """A random YOCO model in float32."""

    def __init__(self, shape: YocoShape, seed: int = 0) -> None:
        """Draw the weights.

        Raises:
            BadInput: heads that do not divide, or no layer of either kind.
        """
        super().__init__()
        if shape.hidden_size % shape.n_self_heads or (
            shape.num_attention_heads % shape.num_key_value_heads
        ):
            raise BadInput("heads of YOCO do not divide", fix="give head counts that divide")
        if min(shape.num_self_decoder_layers, shape.num_cross_decoder_layers) < 1:
            raise BadInput("YOCO has layers of both kinds", fix="give at least one of each")
        self.shape = shape
        heads, dim, hidden = shape.num_attention_heads, shape.head_dim, shape.hidden_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(shape.vocab_size, hidden)
            self.self_layers = nn.ModuleList(
                SelfLayer(shape) for _ in range(shape.num_self_decoder_layers)
            )
            self.kv_norm = nn.RMSNorm(hidden)
            self.k_proj = nn.Linear(hidden, shape.num_key_value_heads * dim, bias=False)
            self.v_proj = nn.Linear(hidden, shape.num_key_value_heads * dim, bias=False)
            self.cross_layers = nn.ModuleList(
                Projected(shape, heads, dim) for _ in range(shape.num_cross_decoder_layers)
            )
            self.norm = nn.RMSNorm(hidden)
            self.lm_head = nn.Linear(hidden, shape.vocab_size, bias=False)
        self.requires_grad_(False)

    def start(self) -> YocoSequence:
        """Return an empty sequence."""
        shape = self.shape
        self_dim = shape.hidden_size // shape.n_self_heads
        return YocoSequence(
            tuple(self._empty(shape.n_self_heads, self_dim) for _ in self.self_layers),
            self._empty(shape.num_key_value_heads, shape.head_dim),
        )

    @torch.inference_mode()
    def prefill(
        self,
        sequence: YocoSequence,
        prompt: Sequence[int],
        *,
        chunk_tokens: int | None = None,
        early_exit: bool = True,
    ) -> Tensor:
        """Process a prompt, in pieces of at most `chunk_tokens`; return the last logits [V].

        With `early_exit` only the prompt's last token goes through the cross-decoder: no layer
        there keeps anything, so that what follows cannot tell.

        Raises:
            BadInput: it is empty.
        """
        if not prompt:
            raise BadInput("a prompt is empty", fix="give at least one token")
        size = chunk_tokens or len(prompt)
        logits = torch.empty(0)
        for start in range(0, len(prompt), size):
            hidden = self._self_decode(sequence, prompt[start : start + size])
            last = start + size >= len(prompt)
            if last or not early_exit:
                hidden = hidden[-1:] if early_exit else hidden
                logits = self._cross_decode(sequence, hidden)[-1]
        return logits

    @torch.inference_mode()
    def decode(self, sequence: YocoSequence, tokens: Sequence[int]) -> Tensor:
        """Append generated tokens: logits [m, V]."""
        return self._cross_decode(sequence, self._self_decode(sequence, tokens))

    def _self_decode(self, sequence: YocoSequence, tokens: Sequence[int]) -> Tensor:
        """Run new tokens through the self-decoder and into the shared cache: [m, hidden]."""
        hidden: Tensor = self.embed(torch.tensor(list(tokens), device=self.embed.weight.device))
        first = sequence.tokens
        positions = torch.arange(first, first + len(hidden), device=hidden.device)
        for layer, window in zip(self.self_layers, sequence.windows, strict=True):
            assert isinstance(layer, SelfLayer)
            normed = layer.attention_norm(hidden)
            keys = self._rotated(layer.k_proj(normed), layer.heads, positions)
            window.append(keys, _split(layer.v_proj(normed), layer.heads))
            queries = self._rotated(layer.q_proj(normed), layer.heads, positions)
            attended = _attend(queries, window, positions, self.shape.sliding_window)
            window.slide(self.shape.sliding_window)
            hidden = layer.finish(hidden, attended)
        normed = self.kv_norm(hidden)
        heads = self.shape.num_key_value_heads
        keys = self._rotated(self.k_proj(normed), heads, positions)
        sequence.shared.append(keys, _split(self.v_proj(normed), heads))
        sequence.token_layers += len(hidden) * len(self.self_layers)
        return hidden

    def _cross_decode(self, sequence: YocoSequence, hidden: Tensor) -> Tensor:
        """Run the last tokens through the cross-decoder: logits [m, V]."""
        end = sequence.tokens
        positions = torch.arange(end - len(hidden), end, device=hidden.device)
        for layer in self.cross_layers:
            assert isinstance(layer, Projected)
            queries = layer.q_proj(layer.attention_norm(hidden))
            rotated = self._rotated(queries, layer.heads, positions)
            hidden = layer.finish(hidden, _attend(rotated, sequence.shared, positions, None))
        sequence.token_layers += len(hidden) * len(self.cross_layers)
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def _empty(self, heads: int, dim: int) -> Rows:
        like = self.embed.weight
        return Rows(like.new_empty(heads, 0, dim), like.new_empty(heads, 0, dim))

    def _rotated(self, x: Tensor, heads: int, positions: Tensor) -> Tensor:
        split = _split(x, heads)
        dim = split.shape[-1]
        powers = torch.arange(0, dim, 2, device=x.device, dtype=torch.float32) / dim
        return apply_rope(split, *cos_sin(self.shape.rope_theta**-powers, positions))


def _split(x: Tensor, heads: int) -> Tensor:
    """Turn [m, H d] into [H, m, d]."""
    return x.reshape(len(x), heads, -1).transpose(0, 1)


def _attend(queries: Tensor, rows: Rows, positions: Tensor, window_tokens: int | None) -> Tensor:
    scale = queries.shape[-1] ** -0.5
    return attend(
        queries,
        rows.keys,
        rows.values,
        positions,
        rows.positions,
        scale=scale,
        window_tokens=window_tokens,
    )
