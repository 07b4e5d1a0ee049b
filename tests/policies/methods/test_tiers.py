"""What tiers say of themselves: sizes of blocks, and what they need."""

import pytest
from contracts.method import MethodContract
from pydantic import ValidationError

from kvtune.errors import BadInput
from kvtune.policies.method import LayerShape
from kvtune.policies.method_stack import MethodStack, parse_stack
from kvtune.policies.methods.tiers import Tiers

LLAMA_8B = [LayerShape(index, 32, 32, 8, 128, 128, 2) for index in range(32)]


class TestTiers(MethodContract):
    samples = ("tiers", "prefix-caching:block_tokens=8 + tiers:eviction=arc")
    exact = "tiers"
    stores_each_token_alone = True


def test_512_tokens_of_an_8b_model_are_64_mib():
    assert Tiers().block_bytes(MethodStack(), LLAMA_8B, 512) == 64 << 20
    assert Tiers().block_bytes(parse_stack("paging + tiers"), LLAMA_8B, 512) == 64 << 20


def test_a_disk_needs_a_folder():
    with pytest.raises(ValidationError, match="folder"):
        Tiers(disk_bytes=1)


@pytest.mark.parametrize("text", ["kivi", "kvquant"])
def test_tokens_in_groups_or_two_forms_have_no_blocks(text):
    with pytest.raises(BadInput, match="no blocks can move"):
        Tiers().block_bytes(parse_stack(text), LLAMA_8B, 512)
