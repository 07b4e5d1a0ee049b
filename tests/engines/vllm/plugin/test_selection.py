from fractions import Fraction
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvtune.engines.vllm.plugin import selection
from kvtune.engines.vllm.plugin.selection import choose, page_scores, pages_to_read
from kvtune.kernels import pages as kernel
from kvtune.policies.plugin_config import QuestConfig


def integers(generator, *shape):
    """Small whole numbers: sums are exact in any order, and ties are many."""
    return torch.randint(-3, 4, shape, generator=generator).float()


@settings(deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_scores_are_those_of_the_kernel_for_each_row(seed, heads, group, rows, pages):
    random = torch.Generator().manual_seed(seed)
    width = 4
    queries = integers(random, rows, heads * group, width)
    low, high = integers(random, heads, 9, width), integers(random, heads, 9, width)
    low, high = low.minimum(high), low.maximum(high)
    table = torch.randint(0, 9, (rows, pages), generator=random)
    ours = page_scores(queries, torch.cat((high, -low), dim=-1), table)
    for row in range(rows):
        theirs = kernel.page_scores(queries[row], low[:, table[row]], high[:, table[row]], "max")
        assert torch.equal(ours[:, row], theirs)


def test_many_long_rows_are_scored_a_few_at_a_time(monkeypatch):
    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.index_select.default:
                self.numbers = max(self.numbers, made.numel())
            return made

    random = torch.Generator().manual_seed(0)
    heads, rows, pages, width = 2, 12, 16, 4
    queries = integers(random, rows, heads, width)
    bounds = integers(random, heads, 9, 2 * width)
    table = torch.randint(0, 9, (rows, pages), generator=random)
    at_once = page_scores(queries, bounds, table)
    two_rows = heads * 2 * pages * 2 * width
    monkeypatch.setattr(selection, "BOUNDS_AT_ONCE", two_rows)
    with Largest() as largest:
        assert torch.equal(page_scores(queries, bounds, table), at_once)
    assert largest.numbers == two_rows


def test_scores_in_bfloat16_are_summed_in_float32():
    # 256 + 1 is 256 in bfloat16.
    bounds = torch.tensor([[[256, 1, 0, 0], [256, 0, 0, 0]]]).bfloat16()
    queries = torch.ones(1, 1, 2).bfloat16()
    assert page_scores(queries, bounds, torch.tensor([[0, 1]])).tolist() == [[[257, 256]]]


def naive_choice(scores, held, kept):
    old = sorted(range(held - 1), key=lambda page: (-scores[page], page))
    return [*sorted(old[: kept - 1]), held - 1]


@given(st.data(), st.integers(1, 4), st.integers(1, 12))
def test_each_row_reads_its_best_pages_and_its_last(data, rows, pages):
    scores = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.integers(-3, 3), min_size=pages, max_size=pages),
                min_size=rows,
                max_size=rows,
            )
        ),
        dtype=torch.float32,
    )
    held = [data.draw(st.integers(1, pages)) for _ in range(rows)]
    kept = [data.draw(st.integers(1, count)) for count in held]
    chosen = choose(scores, torch.tensor(held), torch.tensor(kept)).tolist()
    for row in range(rows):
        wanted = naive_choice(scores[row].tolist(), held[row], kept[row])
        assert chosen[row] == wanted + [held[row] - 1] * (max(kept) - kept[row])


def test_kv_heads_may_choose_apart():
    scores = torch.tensor([[[5.0, 1, 0, 0]], [[1.0, 5, 0, 0]]])
    chosen = choose(scores, torch.tensor([4]), torch.tensor([2]))
    assert chosen.tolist() == [[[0, 3]], [[1, 3]]]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"pages": 3}, [3, 3, 3]),
        ({"budget_tokens": 33}, [3, 3, 3]),
        ({"budget_tokens": 32}, [2, 2, 2]),
        ({"share": 0.25}, [1, 1, 2]),
        ({"share": 1}, [1, 4, 5]),
    ],
)
def test_a_budget_is_rounded_up_to_pages(asked, expected):
    held = torch.tensor([1, 4, 5], dtype=torch.int32)
    assert pages_to_read(QuestConfig(**asked), held, page_tokens=16).tolist() == expected


@given(st.integers(1, 100), st.integers(1, 4096))
def test_a_share_is_that_of_its_decimal_digits(percent, held):
    asked = QuestConfig(share=percent / 100)
    read = pages_to_read(asked, torch.tensor([held], dtype=torch.int32), page_tokens=16)
    assert read.item() == ceil(Fraction(percent, 100) * held)
