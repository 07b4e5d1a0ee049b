"""What layers with a recurrent state keep: Mamba, gated delta nets, gated retention."""

from __future__ import annotations

from collections.abc import Mapping

from kvtune.policies.model_config import DTYPE_BYTES, SERVED_DTYPE_BYTES, ModelConfig
from kvtune.policies.model_layers import Kind, LayerCache, Layers, Rows, State

NEMOTRON_LETTERS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
RECURRENT = ("linear_attention", "mamba")


def gated_delta_net(config: ModelConfig) -> Layers:
    """Every `full_attention_interval`-th layer attends, the others keep a state (Qwen3-Next).

    The state is kept in `mamba_ssm_dtype`, where the config has none in the served 16 bits, as
    vLLM's `--mamba-ssm-cache-dtype auto` does.
    """
    every = config.count_or("full_attention_interval", 4)
    kinds = config.strings("layer_types") or [
        "linear_attention" if (index + 1) % every else "full_attention"
        for index in range(config.layers)
    ]
    key = config.count("linear_key_head_dim") * config.count("linear_num_key_heads")
    heads, value_dim = config.count("linear_num_value_heads"), config.count("linear_value_head_dim")
    state = State(
        heads=heads,
        head_numbers=value_dim * config.count("linear_key_head_dim"),
        head_number_bytes=_dtype_bytes(config, "mamba_ssm_dtype", SERVED_DTYPE_BYTES),
        channels=2 * key + heads * value_dim,
        columns=config.count("linear_conv_kernel_dim") - 1,
        column_number_bytes=SERVED_DTYPE_BYTES,
    )
    return _hybrid(
        config, kinds, {"linear_attention": (state,), "full_attention": (_full(config),)}
    )


def zamba2(config: ModelConfig) -> Layers:
    """Every layer is a Mamba 2 layer; `hybrid` ones also call a shared attention block.

    The block's weights are shared, its cache is not. It attends over twice the hidden size.
    """
    kinds = config.strings("layers_block_type")
    if kinds is None:
        raise config.refusal("it does not state layers_block_type")
    inner = config.count("mamba_expand") * config.count("hidden_size")
    heads = config.count("n_mamba_heads")
    if inner % heads or 2 * config.count("hidden_size") % config.query_heads:
        raise config.refusal("its hidden size does not divide into heads")
    width = 2 * config.count("hidden_size") // config.query_heads
    state = _mamba2(
        config,
        heads=heads,
        head_dim=inner // heads,
        groups=config.count("mamba_ngroups"),
        state_numbers=config.count("mamba_d_state"),
        kernel=config.count("mamba_d_conv"),
        number_bytes=SERVED_DTYPE_BYTES,
    )
    rows = Rows(Kind.FULL, config.kv_heads, width, width)
    return _hybrid(
        config, kinds, {"linear_attention": (state,), "mamba": (state,), "hybrid": (state, rows)}
    )


def nemotron_h(config: ModelConfig) -> Layers:
    """Mamba 2, attention, and layers of neither, as `hybrid_override_pattern` spells them."""
    pattern = config.get("hybrid_override_pattern")
    kinds = config.strings("layers_block_type")
    if isinstance(pattern, str):
        kinds = [NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]
    if kinds is None:
        raise config.refusal("it states neither hybrid_override_pattern nor layers_block_type")
    if config.get("sliding_window"):
        raise config.refusal(f"it slides a window of {config.get('sliding_window')} tokens")
    state = _mamba2(
        config,
        heads=config.count("mamba_num_heads"),
        head_dim=config.count("mamba_head_dim"),
        groups=config.count("n_groups"),
        state_numbers=config.count("ssm_state_size"),
        kernel=config.count("conv_kernel"),
        number_bytes=_dtype_bytes(config, "mamba_ssm_cache_dtype", DTYPE_BYTES["float32"]),
    )
    full = (_full(config),)
    nothing: tuple[LayerCache, ...] = ()
    return _hybrid(
        config,
        kinds,
        {
            **dict.fromkeys(RECURRENT, (state,)),
            **dict.fromkeys(("attention", "full_attention"), full),
            **dict.fromkeys(("mlp", "moe"), nothing),
        },
    )


def mamba(config: ModelConfig) -> Layers:
    """Every layer keeps a state for each inner channel (Mamba, FalconMamba)."""
    inner = config.count("intermediate_size")
    state = State(
        heads=inner,
        head_numbers=config.count("state_size"),
        head_number_bytes=SERVED_DTYPE_BYTES,
        channels=inner,
        columns=config.count("conv_kernel") - 1,
        column_number_bytes=SERVED_DTYPE_BYTES,
    )
    return [(state,)] * config.layers


def yoco(config: ModelConfig) -> Layers:
    """A self-decoder, then layers that all read one cache (YOCO, arXiv 2405.05254).

    The self-decoder keeps windows where `sliding_window` is set, else states of gated retention,
    as `YOCO/yoco/models/decoder/yoco.py` of microsoft/unilm chooses.
    """
    own, crossing = (
        config.count("num_self_decoder_layers"),
        config.count("num_cross_decoder_layers"),
    )
    if own + crossing != config.layers or config.count("num_kv_cache_layers") != 1:
        raise config.refusal("its layers are not a self-decoder and readers of one cache")
    heads, hidden = config.count("n_self_heads"), config.count("hidden_size")
    if hidden % heads:
        raise config.refusal(f"{hidden} does not divide into {heads} heads")
    width = hidden // heads
    first: LayerCache = State(heads, width * width, SERVED_DTYPE_BYTES)
    if config.entries.get("sliding_window") is not None:
        first = Rows(Kind.WINDOW, heads, width, width, config.count("sliding_window"))
    rows = _full(config)
    layers: Layers = [(first,)] * own
    return [*layers, (rows,), *[(rows.shared(),)] * (crossing - 1)]


def _full(config: ModelConfig) -> Rows:
    return Rows(Kind.FULL, config.kv_heads, config.head_dim, config.head_dim)


def _mamba2(
    config: ModelConfig,
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state_numbers: int,
    kernel: int,
    number_bytes: int,
) -> State:
    if heads % groups:
        raise config.refusal(
            f"{heads} heads of a recurrent state do not divide into {groups} groups"
        )
    return State(
        heads=heads,
        head_numbers=head_dim * state_numbers,
        head_number_bytes=number_bytes,
        channels=heads * head_dim,
        groups=groups,
        group_channels=2 * state_numbers,
        columns=kernel - 1,
        column_number_bytes=SERVED_DTYPE_BYTES,
    )


def _hybrid(
    config: ModelConfig,
    kinds: list[str],
    kept: Mapping[str, tuple[LayerCache, ...]],
) -> Layers:
    if len(kinds) != config.layers:
        raise config.refusal("it does not say of every layer what it is")
    strange = sorted({kind for kind in kinds if kind not in kept})
    if strange:
        raise config.refusal(f"it has layers of {', '.join(strange)}")
    return [kept[kind] for kind in kinds]


def _dtype_bytes(config: ModelConfig, key: str, default: int) -> int:
    name = config.get(key)
    if name is None:
        return default
    if not isinstance(name, str) or name not in DTYPE_BYTES:
        raise config.refusal(f"its {key} is {name}")
    return DTYPE_BYTES[name]
