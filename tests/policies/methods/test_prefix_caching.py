"""Keys of blocks and which of them stay: the same start, the same salt, the same policy."""

import hashlib
import json

import pytest
from contracts.method import MethodContract
from hypothesis import given
from hypothesis import strategies as st

from kvtune.policies.methods.prefix_caching import BlockMap, PrefixCaching

METHOD = PrefixCaching()
TOKENS = list(range(100, 148))


class TestPrefixCaching(MethodContract):
    samples = ("prefix-caching:block_tokens=8", "prefix-caching:block_tokens=8 + paging")
    exact = "prefix-caching:block_tokens=8"


def keys(tokens, method=METHOD, model="m", policy=""):
    return method.keys(tokens, method.root(model, policy))


def common(one, two):
    return next((n for n, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), len(one))


def test_a_key_is_the_hash_of_its_parent_and_its_tokens():
    extra = json.dumps({"lora": "", "model": "m", "policy": "", "salt": ""}).encode()
    parent = hashlib.sha256(extra).digest()
    found = keys(TOKENS)
    for number in range(3):
        own = TOKENS[16 * number : 16 * number + 16]
        packed = b"".join(bytes([token, 0, 0, 0]) for token in own)
        parent = hashlib.sha256(parent + packed).digest()
        assert found[number] == parent


def test_48_tokens_give_32_from_the_cache_so_that_one_is_computed():
    blocks = BlockMap()
    blocks.add(dict.fromkeys(keys(TOKENS), "block"))
    assert len(blocks) == 3
    assert len(blocks.match(keys(TOKENS)[: METHOD.most_blocks(48)])) == 2
    assert METHOD.most_blocks(49) == 3
    assert METHOD.most_blocks(1) == METHOD.most_blocks(16) == 0


@pytest.mark.parametrize(("changed", "hit"), [(0, 0), (20, 16), (15, 0), (16, 16), (47, 32)])
def test_a_changed_token_ends_the_hit_at_the_block_before_it(changed, hit):
    other = list(TOKENS)
    other[changed] += 1
    assert common(keys(TOKENS), keys(other)) * 16 == hit


@pytest.mark.parametrize(
    "other",
    [
        {"method": PrefixCaching(salt="tenant")},
        {"method": PrefixCaching(lora="adapter")},
        {"model": "other"},
        {"policy": "int4"},
    ],
)
def test_another_tenant_adapter_model_or_policy_shares_nothing(other):
    assert common(keys(TOKENS), keys(TOKENS, **other)) == 0


def test_salt_cannot_pass_for_another_field():
    assert keys(TOKENS, PrefixCaching(salt='a","x":"')) != keys(TOKENS, PrefixCaching(salt="a"))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 9))
def test_only_full_blocks_have_keys_and_a_longer_prompt_keeps_them(tokens, size):
    method = PrefixCaching(block_tokens=size)
    found = keys(tokens, method)
    assert len(found) == len(tokens) // size
    assert keys([*tokens, 5, 6, 7], method)[: len(found)] == found
    assert method.most_blocks(len(tokens)) * size < max(len(tokens), 1)


def test_a_missing_block_ends_the_prefix():
    blocks = BlockMap()
    blocks.add({b"1": 1, b"3": 3})
    assert blocks.match([b"1", b"2", b"3"]) == [1]


def test_the_last_block_of_the_prompt_used_longest_ago_goes_first():
    gone = []
    blocks = BlockMap(4, lambda key, _: gone.append(key))
    blocks.add({b"a1": 1, b"a2": 2})
    blocks.add({b"b1": 3, b"b2": 4})
    blocks.match([b"a1", b"a2"])
    blocks.add({b"c1": 5})
    assert gone == [b"b2"]
    blocks.add({b"d1": 6, b"d2": 7, b"d3": 8})
    assert gone == [b"b2", b"b1", b"a2", b"a1"]


def test_of_a_sequence_longer_than_the_capacity_the_first_blocks_stay():
    blocks = BlockMap(2)
    blocks.add({b"1": 1, b"2": 2, b"3": 3})
    assert blocks.match([b"1", b"2", b"3"]) == [1, 2]
