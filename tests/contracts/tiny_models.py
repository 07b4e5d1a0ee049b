"""Tiny random decoders of the families that the reference engine runs."""

import functools

import torch

from kvtune.engines.reference.calibrate import calibrate
from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.policies.calibration import CalibratedMethod
from kvtune.policies.method_stack import MethodStack

VOCABULARY = 97
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
}


def tiny_model(config_class="LlamaConfig", **changes):
    """A random model whose attention is far from uniform, in float32."""
    import transformers

    torch.set_num_threads(1)
    config = getattr(transformers, config_class)(**{**SIZES, **changes})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for block in model.model.layers:
        block.self_attn.q_proj.weight.data *= 8
        block.self_attn.k_proj.weight.data *= 8
        block.self_attn.v_proj.weight.data *= 8
    return model


@functools.cache
def tiny_engine(config_class="LlamaConfig"):
    """One engine for all tests that do not change it."""
    return ReferenceEngine(tiny_model(config_class))


def tokens(count, seed=0):
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()


def ready(engine, stack: MethodStack) -> MethodStack:
    """Calibrate what the stack needs on this engine, once."""
    for method in stack.methods:
        known = getattr(method, "calibration_key", None)
        if isinstance(method, CalibratedMethod) and known not in engine.calibrations:
            texts = [tokens(160, seed=100), tokens(160, seed=101)]
            engine.use_calibration(method, calibrate(engine, method, texts))
    return stack


def follow(engine, stack, prompt, continuation, *, chunk_tokens=None, exact_prefill=True, spans=()):
    """Prefill, then decode token by token: logits [1 + len(continuation), V] and the sequence."""
    sequence = engine.start(ready(engine, stack), spans, exact_prefill=exact_prefill)
    rows = engine.prefill([sequence], [prompt], chunk_tokens=chunk_tokens)
    for token in continuation:
        rows.append(engine.decode([sequence], [[token]])[0][-1])
    return torch.stack(rows), sequence
