"""Where kvtune's plugin can serve, and how many tokens are worth keeping or reading there."""

from __future__ import annotations

from collections.abc import Mapping

from kvtune import __version__
from kvtune.policies.base import Context
from kvtune.policies.kv_dtype import FP8
from kvtune.policies.plugin_arguments import whole
from kvtune.policies.settings import base_settings, read_count
from kvtune.types import EngineInfo

PLATFORMS = ("cpu",)
"""Where the plugin was run. On CUDA it was not yet, so that nobody is offered it there unasked."""

SMALLEST_TOKENS, SMALLEST_SHARE = 256, 1 / 16
"""The least that a search keeps or reads of a context, in tokens and as a share of it."""

_STORED_AS_SAID = frozenset({"auto", "bfloat16", "float16", *FP8})
_RANKS = (
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "decode-context-parallel-size",
    "prefill-context-parallel-size",
)
_EXCLUDES: Mapping[str, str] = {
    "speculative-config": "takes tokens back that were written already",
    "kv-transfer-config": "brings in KV that passes the plugin by",
    "kv-offloading-size": "brings in KV that passes the plugin by",
    "prefix-match-unit": "copies pages that the plugin cannot follow",
    "kv-cache-dtype-skip-layers": "gives layers pages of their own",
}


def plugin_problem(engine: EngineInfo) -> tuple[str, str] | None:
    """Why servers of an engine cannot be asked for the plugin, and the fix; None if they can."""
    if engine.name != "vllm":
        return "kvtune's plugin runs in vLLM only", "tune on vLLM"
    where = engine.python or "the Python that runs vLLM"
    fix = f"{where} -m pip install kvtune=={__version__}"
    if engine.python is None and engine.plugin is None:
        return "it is not known whether kvtune's plugin is installed beside this vLLM", fix
    if engine.plugin is None:
        missing = "kvtune's plugin is not installed beside vLLM, or not named in VLLM_PLUGINS"
        return f"{missing}, and vLLM then does nothing of it", fix
    if engine.plugin != __version__:
        return f"the plugin beside vLLM is that of kvtune {engine.plugin}, not {__version__}", fix
    return None


def why_not_served(ctx: Context) -> str:
    """Why no policy of the plugin can be had here; empty when it can.

    The plugin itself knows more of a server and refuses at start what is wrong here.
    """
    if (problem := plugin_problem(ctx.engine)) is not None:
        return "; to fix: ".join(problem)
    if not ctx.engine.tested:
        return f"kvtune's plugin was never tried with vLLM {ctx.engine.version}"
    if ctx.platform not in PLATFORMS:
        return "kvtune's plugin was run on CPUs only so far"
    if ctx.model is None:
        return "the model is not known to hold keys and values of every token in every layer"
    for argument in _RANKS:
        if (read_count(ctx.base_arguments.get(argument)) or 1) > 1:
            return f"kvtune's plugin serves one rank, and {argument} is fixed by --engine-args"
    for argument, why in _EXCLUDES.items():
        if whole(argument, ctx.base_arguments) not in (None, 0, False):
            return f"{argument} {why}"
    held = base_settings(ctx).kv_cache_dtype
    if held not in _STORED_AS_SAID:
        return f"kvtune's plugin was never tried with kv-cache-dtype {held}"
    return ""


def why_all_is_kept(ctx: Context) -> str:
    """Why a search tries to do without no part of a context here; empty when it does."""
    if budgets_tokens(ctx):
        return ""
    if (context := context_tokens(ctx)) is None:
        return "it is not known how long requests are"
    return f"contexts of {context:,} tokens are too short to do without a part of them"


def budgets_tokens(ctx: Context) -> tuple[int, ...]:
    """Powers of two below the context that long requests reach, ascending; empty if there is none.

    That is the 95th percentile of prompts and that of outputs, or the longest request served. The
    smallest is a sixteenth of it, two pages or `SMALLEST_TOKENS`, whichever is most.
    """
    now, context = base_settings(ctx), context_tokens(ctx)
    if context is None:
        return ()
    least = max(int(context * SMALLEST_SHARE), 2 * now.block_tokens, SMALLEST_TOKENS)
    powers = (1 << bits for bits in range(context.bit_length()))
    return tuple(power for power in powers if least <= power < context)


def context_tokens(ctx: Context) -> int | None:
    """The context that a long request reaches, in tokens; None where nothing says it."""
    seen, longest = ctx.fingerprint, base_settings(ctx).max_model_len_tokens
    inputs = seen.input_tokens.p95 if seen and seen.input_tokens else None
    outputs = seen.output_tokens.p95 if seen and seen.output_tokens else None
    if inputs is None or outputs is None:
        return longest
    reached = round(inputs + outputs)
    return reached if longest is None else min(reached, longest)


def prompt_tokens(ctx: Context) -> int | None:
    """How long long prompts are, in tokens: the 95th percentile, or the longest request served."""
    seen, longest = ctx.fingerprint, base_settings(ctx).max_model_len_tokens
    inputs = seen.input_tokens.p95 if seen and seen.input_tokens else None
    if inputs is None:
        return longest
    return round(inputs) if longest is None else min(round(inputs), longest)
