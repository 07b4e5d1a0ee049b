"""Why a server cannot be given what it asks for. Pure: facts in, reasons out.

What is not refused here is tried in tests/integration, or handled by the code next door. Whatever
would be served wrong without a word belongs in this table, or, where it is about what is asked and
vLLM's own options beside it, in `kvtune.policies.plugin_clashes`, which a search knows too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtune.policies.plugin_clashes import Beside, clashes
from kvtune.policies.plugin_config import PluginConfig

TESTED = "0.32.x"
"""The versions of vLLM that the plugin's tests ran on."""

CPU_KV_DTYPES = frozenset({"auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"})
"""What vLLM's CPU kernels store as they say; they take the other names and answer garbage."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What of a vLLM configuration decides whether the plugin can serve it."""

    vllm_version: str
    platform: str
    backend_is_ours: bool = True
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    is_speculative: bool = False
    has_connector: bool = False
    is_generative: bool = True
    is_multimodal: bool = False
    uses_mla: bool = False
    has_state: bool = False
    has_window: bool = False
    is_encoder_decoder: bool = False
    shares_layers: bool = False
    kv_dtype: str = "auto"
    skips_kv_layers: bool = False
    matches_part_blocks: bool = False
    uses_v2_runner: bool = False
    splits_batches: bool = False
    data_parallel: int = 1
    has_lora: bool = False
    has_prefix_cache: bool = True
    prefix_hash: str = "sha256"
    knows_weights: bool = True


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not, and what would help."""

    why: str
    fix: str


_OTHER_MODEL = "take kvtune's section out of --additional-config for this model"

_RULES: tuple[tuple[Callable[[Facts, PluginConfig], bool], str, str], ...] = (
    (
        lambda facts, _: facts.platform not in ("cpu", "cuda"),
        "it knows the attention of CPU and CUDA only",
        "take kvtune's section out of --additional-config on this platform",
    ),
    (
        lambda facts, _: facts.platform == "cpu" and not facts.backend_is_ours,
        "another plugin took the place of the CPU attention backend",
        "name the plugins to load in VLLM_PLUGINS",
    ),
    (
        lambda facts, _: facts.platform == "cuda" and not facts.backend_is_ours,
        "on CUDA it runs as attention backend CUSTOM, which is not chosen",
        "add --attention-backend CUSTOM",
    ),
    (
        lambda facts, _: facts.tensor_parallel > 1,
        "it was never tried with tensor parallelism",
        "set --tensor-parallel-size 1",
    ),
    (
        lambda facts, _: facts.pipeline_parallel > 1,
        "it was never tried with pipeline parallelism",
        "set --pipeline-parallel-size 1",
    ),
    (
        lambda facts, _: facts.context_parallel > 1,
        "context parallelism spreads a request's pages over ranks",
        "set the context parallel sizes to 1",
    ),
    (
        lambda facts, _: facts.is_speculative,
        "speculative decoding takes tokens back that it has written already",
        "leave --speculative-config out",
    ),
    (
        lambda facts, _: facts.has_connector,
        "KV that a connector or an offload brings in passes it by",
        "leave --kv-transfer-config and --kv-offloading-size out",
    ),
    (
        lambda facts, _: facts.matches_part_blocks,
        "--prefix-match-unit copies pages that it cannot follow",
        "leave --prefix-match-unit out",
    ),
    (
        lambda facts, _: not facts.is_generative,
        "the model is not one that generates text",
        _OTHER_MODEL,
    ),
    (
        lambda facts, _: facts.is_encoder_decoder,
        "the model has an encoder, whose attention is another",
        _OTHER_MODEL,
    ),
    (
        lambda facts, _: facts.is_multimodal,
        "it was never tried with images or sound in a prompt",
        _OTHER_MODEL,
    ),
    (
        lambda facts, _: facts.uses_mla,
        "the model stores latent vectors instead of keys and values (MLA)",
        _OTHER_MODEL,
    ),
    (
        lambda facts, _: facts.has_state,
        "some layers of the model hold a state instead of keys and values",
        _OTHER_MODEL,
    ),
    (
        lambda facts, _: facts.has_window,
        "some layers of the model have a window of their own",
        _OTHER_MODEL,
    ),
    (
        lambda facts, _: facts.shares_layers,
        "some layers of the model read the KV cache of others",
        _OTHER_MODEL,
    ),
    (
        lambda facts, _: facts.platform == "cpu" and facts.kv_dtype not in CPU_KV_DTYPES,
        "vLLM's CPU kernels store this --kv-cache-dtype wrong",
        f"take one of {', '.join(sorted(CPU_KV_DTYPES))}",
    ),
    (
        lambda facts, asked: asked.store is not None and facts.platform != "cpu",
        "its quantized store was never tried on this platform",
        "take vLLM's own --kv-cache-dtype instead of store",
    ),
    (
        lambda facts, asked: (
            asked.quest is not None and asked.quest.per_kv_head and facts.platform != "cpu"
        ),
        "pages of one KV head can be told apart in the CPU layout of the cache only",
        "leave quest.per_kv_head out",
    ),
    (
        lambda facts, asked: asked.tiers is not None and facts.platform != "cpu",
        "its tiers were tried on CPU only",
        "take vLLM's own --kv-offloading-size instead of tiers",
    ),
    (
        lambda facts, asked: asked.tiers is not None and facts.has_lora,
        "tiers know an adapter by its name only, whose weights may change",
        "leave --enable-lora or tiers out",
    ),
    (
        lambda facts, asked: asked.tiers is not None and facts.data_parallel > 1,
        "tiers were never tried with data parallelism",
        "set --data-parallel-size 1",
    ),
    (
        lambda facts, asked: (
            asked.tiers is not None and asked.tiers.disk_bytes > 0 and not facts.knows_weights
        ),
        "files of tiers outlive the server, and there are no weights to know its model by",
        "name the model by its folder, or leave tiers.disk_bytes and tiers.disk_path out",
    ),
    (
        lambda facts, asked: asked.page_eviction is not None and facts.platform != "cpu",
        "its page eviction was never tried on this platform",
        "leave page_eviction out",
    ),
    (
        lambda facts, asked: asked.page_eviction is not None and facts.uses_v2_runner,
        "model runner V2 tells workers too late which pages are gone",
        "set VLLM_USE_V2_MODEL_RUNNER=0 in the environment",
    ),
    (
        lambda facts, asked: asked.page_eviction is not None and facts.splits_batches,
        "page eviction knows a step's requests as one batch only",
        "leave --enable-dbo and --ubatch-size out, or page_eviction",
    ),
)


def refusals(facts: Facts, asked: PluginConfig) -> list[Refusal]:
    """Everything that stands against serving what is `asked`, in the order to be told."""
    found = [Refusal(why, fix) for applies, why, fix in _RULES if applies(facts, asked)]
    beside = Beside(
        asked, facts.kv_dtype, facts.has_prefix_cache, facts.prefix_hash, facts.skips_kv_layers
    )
    return found + [Refusal(clash.why, clash.fix) for clash in clashes(beside)]


def is_tested(vllm_version: str) -> bool:
    """Whether the plugin's tests ran on this version of vLLM."""
    return vllm_version.startswith(TESTED.removesuffix("x"))
