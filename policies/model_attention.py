"""What layers of plain, windowed, chunked, shared and latent attention keep.

The rule of a family for a missing entry is the default of its transformers configuration class,
which vLLM reads too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtune.policies.model_config import ModelConfig
from kvtune.policies.model_layers import Kind, LayerCache, Layers, Rows

KINDS = {
    "full_attention": Kind.FULL,
    "sliding_attention": Kind.WINDOW,
    "chunked_attention": Kind.CHUNK,
}
INDEX_SCALE_BYTES = 4
INDEX_SCALED_NUMBERS = 128
COMPRESSOR_NUMBER_BYTES = 4
"""A compressor sums in float32."""


def plain(config: ModelConfig) -> Layers:
    """Every layer attends to every token."""
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and not spans_all(config, window):
        raise config.refusal(f"it attends through a sliding window of {window} tokens")
    if any(kind != "full_attention" for kind in config.strings("layer_types") or ()):
        raise config.refusal("its layer_types are not all full_attention")
    return spanned(config, ["full_attention"] * config.layers)


def all_windowed(config: ModelConfig) -> Layers:
    """Every layer attends through `sliding_window`, if there is one."""
    kind = "sliding_attention" if config.get("sliding_window") else "full_attention"
    return spanned(config, [kind] * config.layers)


def mistral(config: ModelConfig) -> Layers:
    """Like `all_windowed`, with a window of 4,096 where the entry is absent (null is none)."""
    if "sliding_window" in config.entries:
        return all_windowed(config)
    rows = _attention(config, Kind.WINDOW, 4096)
    return [(rows,)] * config.layers


def windowed_from(config: ModelConfig) -> Layers:
    """Layers from `max_window_layers` on are windowed where `use_sliding_window` says so (Qwen)."""
    if not (config.get("use_sliding_window", False) and config.get("sliding_window")):
        return spanned(config, ["full_attention"] * config.layers)
    first = config.count("max_window_layers")
    return spanned(
        config,
        [
            "sliding_attention" if index >= first else "full_attention"
            for index in range(config.layers)
        ],
    )


def unwindowed(config: ModelConfig) -> Layers:
    """Windows are off unless `use_sliding_window` says so, and then no rule is known."""
    if config.get("use_sliding_window", False) and config.get("sliding_window"):
        raise config.refusal(f"it slides a window of {config.get('sliding_window')} tokens")
    return spanned(config, ["full_attention"] * config.layers)


def alternating(config: ModelConfig) -> Layers:
    """Every second layer is full, the first is windowed (Gemma 2, gpt-oss)."""
    return spanned(config, _interleaved(config, 2))


def gemma3(config: ModelConfig) -> Layers:
    """Every `sliding_window_pattern`-th layer is full, the others are windowed."""
    return spanned(config, _interleaved(config, config.count_or("sliding_window_pattern", 6)))


def listed(config: ModelConfig) -> Layers:
    """The config lists the kind of every layer."""
    return spanned(config, None)


def gemma3n(config: ModelConfig) -> Layers:
    """The last `num_kv_shared_layers` layers read the cache of the last of their kind before."""
    layers = spanned(config, None)
    shared = config.get("num_kv_shared_layers", 0)
    if not isinstance(shared, int) or not 0 <= shared < len(layers):
        raise config.refusal(f"its num_kv_shared_layers is {shared!r}")
    owners = len(layers) - shared
    owned_kinds = {layer[0].kind for layer in layers[:owners]}
    if any(layer[0].kind not in owned_kinds for layer in layers[owners:]):
        raise config.refusal("its shared layers read a cache that no layer keeps")
    return layers[:owners] + [_share(layer) for layer in layers[owners:]]


def llama4(config: ModelConfig) -> Layers:
    """Layers without rotary positions are full, the others attend within a chunk."""
    chunk = config.count("attention_chunk_size")
    marks = config.get("no_rope_layers") or [
        int((index + 1) % config.count_or("no_rope_layer_interval", 4) != 0)
        for index in range(config.layers)
    ]
    if not isinstance(marks, list) or len(marks) != config.layers:
        raise config.refusal("its no_rope_layers does not list every layer")
    kinds = ["chunked_attention" if mark else "full_attention" for mark in marks]
    return spanned(config, kinds, chunk)


def falcon(config: ModelConfig) -> Layers:
    """One KV head under `multi_query`, which the newer decoder ignores."""
    new = config.get("new_decoder_architecture", False)
    multi_query = not new and config.get("multi_query", True)
    alias = "num_kv_heads" if config.entries.get("num_kv_heads") is not None else "n_head_kv"
    heads = 1 if multi_query else config.count_or(alias, config.query_heads)
    return [(Rows(Kind.FULL, heads, config.head_dim, config.head_dim),)] * config.layers


def gpt_bigcode(config: ModelConfig) -> Layers:
    """One KV head unless `multi_query` is off (StarCoder)."""
    heads = 1 if config.get("multi_query", True) else config.query_heads
    return [(Rows(Kind.FULL, heads, config.head_dim, config.head_dim),)] * config.layers


def latent(config: ModelConfig) -> Layers:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one row for all heads.

    With `index_topk` (DeepSeek-V3.2) a layer also keeps an index of one key for each token, in fp8
    with a float32 scale for every 128 numbers, and then reads only the tokens it picked. A layer
    that reuses an earlier one's picks keeps no index. Layers for multi-token prediction are left
    out: an engine keeps them only for speculative decoding.
    """
    width = config.count("kv_lora_rank") + config.count("qk_rope_head_dim")
    picked = config.count_or("index_topk", 0)
    rows = Rows(Kind.LATENT, 1, width, read_rows=picked or None)
    if not picked:
        return [(rows,)] * config.layers
    index = _index(config)
    return [(rows, index) if indexed else (rows,) for indexed in indexed_layers(config)]


def deepseek_v4(config: ModelConfig) -> Layers:
    """Windows everywhere; most layers add rows for 4 or 128 tokens each (DeepSeek-V4).

    Layers that compress 4 tokens also keep an index of those rows. A compressor keeps its float32
    keys and scores of the tokens it still sums: the last `ratio`, twice that where ratio is 4.
    """
    width = config.count("head_dim")
    if config.kv_heads != 1:
        raise config.refusal(f"its {config.spelling.kv_heads} is {config.kv_heads}, not 1")
    ratios = config.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < config.layers:
        raise config.refusal("its compress_ratios does not list every layer")
    window = Rows(Kind.WINDOW, 1, width, span_tokens=config.count("sliding_window"))
    index_width = config.count("index_head_dim")
    picked = config.count("index_topk")

    def layer(ratio: object) -> tuple[LayerCache, ...]:
        if ratio == 0:
            return (window,)
        if ratio == 128:
            rows = Rows(Kind.COMPRESSED, 1, width, tokens_per_row=128)
            return (window, rows, _compressor(width, 128))
        if ratio == 4:
            rows = Rows(Kind.COMPRESSED, 1, width, tokens_per_row=4, read_rows=picked)
            sums = (_compressor(2 * width, 8), _compressor(2 * index_width, 8))
            return (window, rows, _index(config, tokens_per_row=4), *sums)
        raise config.refusal(f"its compress_ratios hold {ratio!r}, not 0, 4 or 128")

    return [layer(ratio) for ratio in ratios[: config.layers]]


def spanned(
    config: ModelConfig, default: Sequence[str] | None, chunk_tokens: int | None = None
) -> Layers:
    """Return attention layers of the kinds that `layer_types` lists, else those of `default`."""
    kinds = config.strings("layer_types") or default
    if kinds is None:
        raise config.refusal("it does not state layer_types")
    if len(kinds) < config.layers:
        raise config.refusal(f"its layer_types lists {len(kinds)} of {config.layers} layers")
    # Some checkpoints append the layers of multi-token prediction.
    kinds = kinds[: config.layers]
    strange = sorted({kind for kind in kinds if kind not in KINDS})
    if strange:
        raise config.refusal(f"its layer_types hold {', '.join(strange)}")
    spans: dict[Kind, Callable[[], int | None]] = {
        Kind.FULL: lambda: None,
        Kind.WINDOW: lambda: config.count("sliding_window"),
        Kind.CHUNK: lambda: chunk_tokens or config.count("attention_chunk_size"),
    }
    rows = {
        kind: (_attention(config, KINDS[kind], spans[KINDS[kind]]()),)
        for kind in sorted(set(kinds))
    }
    return [rows[kind] for kind in kinds]


def spans_all(config: ModelConfig, span: object) -> bool:
    """Say whether a window never drops a token, as the longest sequence fits into it."""
    longest = config.get(config.spelling.max_tokens)
    return isinstance(span, int) and isinstance(longest, int) and span >= longest


def _attention(config: ModelConfig, kind: Kind, span: int | None) -> Rows:
    if spans_all(config, span):
        kind, span = Kind.FULL, None
    return Rows(kind, config.kv_heads, config.head_dim, config.head_dim, span)


def _interleaved(config: ModelConfig, every: int) -> list[str]:
    return [
        "sliding_attention" if (index + 1) % every else "full_attention"
        for index in range(config.layers)
    ]


def _share(layer: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
    return tuple(rows.shared() for rows in layer if isinstance(rows, Rows))


def _index(config: ModelConfig, tokens_per_row: int = 1) -> Rows:
    width = config.count("index_head_dim")
    row_bytes = width + width // INDEX_SCALED_NUMBERS * INDEX_SCALE_BYTES
    return Rows(Kind.INDEX, 1, row_bytes, tokens_per_row=tokens_per_row, number_bytes=1)


def indexed_layers(config: ModelConfig) -> list[bool]:
    """Say of each layer of sparse attention whether it picks tokens by an index of its own."""
    modes = config.strings("indexer_types")
    pattern = config.get("index_topk_pattern")
    if modes is None and isinstance(pattern, str):
        modes = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if modes is None and pattern is None:
        every = config.count_or("index_topk_freq", 1)
        offset = config.get("index_skip_topk_offset", 2)
        if not isinstance(offset, int):
            raise config.refusal(f"its index_skip_topk_offset is {offset!r}")
        return [max(index - offset + 1, 0) % every == 0 for index in range(config.layers)]
    if modes is None or len(modes) < config.layers or not set(modes) <= {"full", "shared"}:
        raise config.refusal("it does not say for every layer whether it has an index")
    return [mode == "full" for mode in modes[: config.layers]]


def _compressor(width: int, tokens: int) -> Rows:
    return Rows(Kind.STATE, 1, 2 * width, span_tokens=tokens, number_bytes=COMPRESSOR_NUMBER_BYTES)
