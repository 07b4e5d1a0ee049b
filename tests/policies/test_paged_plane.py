"""Blocks of a shared pool: waste below one block, copies only on write, nothing leaks."""

import copy
import gc
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.policies.method import History, PlaneShape
from kvtune.policies.method_stack import parse_method
from kvtune.policies.methods.paging import Paging
from kvtune.policies.paged_plane import BlockPool, PagedPlane
from kvtune.policies.plane import FullCodec, Piece, PlaneContext, TokenPlane, full_plane

torch.set_num_threads(1)
HEADS, WIDTH = 2, 8
SHAPE = PlaneShape("key", HEADS, WIDTH, 4, 0, 4)


def vectors(count, seed=0):
    return torch.randn(HEADS, count, WIDTH, generator=torch.Generator().manual_seed(seed))


def paged(count=0, engine=None, block_tokens=16):
    plane = PagedPlane(FullCodec(), block_tokens, {} if engine is None else engine)
    if count:
        plane.append(vectors(count))
    return plane


def engine_pool(engine):
    (pool,) = (value for value in engine.values() if isinstance(value, BlockPool))
    return pool


def fork(plane):
    return copy.deepcopy(plane)


def test_33_tokens_take_3_blocks_of_16_and_waste_15_slots():
    assert (Paging().blocks(33), Paging().slack_tokens(33)) == (3, 15)
    plane = paged(33)
    # 3 blocks x 16 slots x 2 heads x 8 channels x 4 bytes, and 3 entries of 4 bytes.
    assert plane.nbytes == 3 * 16 * 2 * 8 * 4 + 3 * 4
    assert plane.nbytes == sum(x.numel() * x.element_size() for x in plane.tensors().values())


@pytest.mark.parametrize(("count", "copies"), [(33, 1), (32, 0), (48, 0), (47, 1)])
def test_appending_to_a_fork_copies_only_a_partial_block(count, copies):
    engine = {}
    plane = paged(count, engine)
    twin = fork(plane)
    pool = engine_pool(engine)
    assert pool.used_blocks == -(-count // 16)
    before = plane.read().clone()
    twin.append(vectors(1, 1))
    assert pool.copied_blocks == copies
    assert torch.equal(plane.read(), before)
    assert torch.equal(twin.read(), torch.cat((before, vectors(1, 1)), dim=1))
    # The first one owns its last block alone now.
    plane.append(vectors(1, 2))
    assert pool.copied_blocks == copies


def test_references_return_to_zero_when_everyone_has_left():
    engine = {}
    planes = [paged(33, engine) for _ in range(3)]
    planes.append(fork(planes[0]))
    pool = engine_pool(engine)
    piece = planes[1].share(16, 32)
    planes[0].clear()
    planes[3].clear()
    assert pool.used_blocks == 6
    planes.clear()
    gc.collect()
    assert pool.used_blocks == 1
    piece.release()
    assert sum(pool.references) == 0


def test_attention_over_a_shuffled_table_equals_contiguous_attention():
    engine = {}
    others = [paged(16, engine) for _ in range(12)]
    random.Random(4).shuffle(others)
    for other in others:
        other.clear()
    keys, values = paged(engine=engine), paged(engine=engine)
    for start in range(0, 70, 7):
        keys.append(vectors(70)[:, start : start + 7])
        values.append(vectors(70, 1)[:, start : start + 7])
    assert keys.blocks != sorted(keys.blocks)
    query = vectors(3, 9)
    attention = torch.nn.functional.scaled_dot_product_attention
    expected = attention(query, vectors(70), vectors(70, 1))
    found = attention(query, keys.read(), values.read())
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("akfs"), st.integers(1, 40), st.integers(0, 99)), max_size=8)
)
def test_pages_hold_what_a_contiguous_cache_holds(steps):
    engine = {}
    plane, plain = paged(20, engine, 8), TokenPlane(FullCodec())
    plain.append(vectors(20))
    forks = []
    for action, count, seed in steps:
        if action == "a":
            plane.append(vectors(count, seed))
            plain.append(vectors(count, seed))
        elif action == "k":
            chosen = torch.rand(HEADS, plain.tokens, generator=torch.Generator().manual_seed(seed))
            index = chosen.argsort(-1)[:, : min(count, plain.tokens)].sort(-1).values
            plane.keep(index)
            plain.keep(index)
        elif action == "f":
            forks.append((plane, plain.read().clone()))
            plane = fork(plane)
        else:
            plane.swap_in(plane.swap_out())
        assert plane.tokens == plain.tokens
        assert torch.equal(plane.read(), plain.read())
        formula = Paging(block_tokens=8).plane_bytes(
            SHAPE, History(plain.tokens), lambda shape, held: shape.full_bytes(held.tokens)
        )
        assert plane.nbytes == formula
    for old, content in forks:
        assert torch.equal(old.read(), content)
    pool = engine_pool(engine)
    assert pool.used_blocks == len(
        {block for p in (plane, *(f for f, _ in forks)) for block in p.blocks}
    )


def test_dropping_tokens_frees_the_blocks_that_it_empties():
    engine = {}
    plane = paged(64, engine)
    plane.keep(torch.tensor([[*range(16), 20, 40, 63]]))
    assert len(plane.blocks) == engine_pool(engine).used_blocks == 2
    assert torch.equal(plane.read(), vectors(64)[:, [*range(16), 20, 40, 63]])


def test_a_shared_block_is_adopted_without_a_copy():
    engine = {}
    plane, other = paged(40, engine), paged(engine=engine)
    pool = engine_pool(engine)
    for start in (0, 16):
        other.adopt(plane.share(start, start + 16))
    assert other.blocks == plane.blocks[:2]
    assert pool.used_blocks == 3
    other.adopt(plane.share(32, 40))
    assert torch.equal(other.read(), plane.read())
    assert pool.used_blocks == 4


def test_tensors_in_the_order_of_a_file_go_to_the_same_pool():
    shape = PlaneContext(SHAPE, torch.float32, torch.device("cpu"))
    method = parse_method("vllm-int8-per-token-head")
    engine = {}
    plane, other = (PagedPlane(method.plane(shape, full_plane).codec, 16, engine) for _ in range(2))
    plane.append(vectors(16))
    stored = plane.share(0, 9).tensors
    other.adopt(Piece(dict(reversed(stored.items()))))
    assert other.pool is engine_pool(engine)
    assert torch.equal(other.read(), plane.read()[:, :9])
