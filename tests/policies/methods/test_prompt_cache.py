"""What Prompt Cache says of itself; what it does is tested with the engine's modules."""

import pytest
from contracts.method import MethodContract

from kvtune.policies.method import LayerShape
from kvtune.policies.method_stack import MethodStack
from kvtune.policies.methods.prompt_cache import PromptCache


class TestPromptCache(MethodContract):
    samples = ("prompt-cache",)
    exact = "prompt-cache"
    stores_each_token_alone = True


@pytest.mark.parametrize(
    ("layers", "heads", "tokens", "expected"),
    [(32, 32, 1, 524_288), (80, 64, 1000, 2_621_440_000)],
)
def test_modules_take_what_the_paper_says_for_models_without_grouped_heads(
    layers, heads, tokens, expected
):
    shapes = [LayerShape(n, layers, heads, heads, 128, 128, 2) for n in range(layers)]
    assert PromptCache().module_bytes(MethodStack(), shapes, tokens) == expected


def test_a_prefix_cache_never_takes_modules_for_prefixes():
    assert PromptCache().publish == "never"
