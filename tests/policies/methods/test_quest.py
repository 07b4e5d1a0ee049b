"""Quest reads the pages that may match, never misses a planted one, and counts what it touches."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from contracts.method import MethodContract  # noqa: E402
from contracts.tiny_models import follow, ready, tiny_engine, tokens  # noqa: E402
from pydantic import ValidationError  # noqa: E402

from kvtune.engines.reference.layer import LayerCache  # noqa: E402
from kvtune.engines.reference.layer_setup import LayerSetup  # noqa: E402
from kvtune.engines.reference.rope import Rope  # noqa: E402
from kvtune.policies.eviction import Evictor, EvictorContext  # noqa: E402
from kvtune.policies.footprint import footprint  # noqa: E402
from kvtune.policies.method import Axis, History, LayerShape, StoreMethod, TokenMethod  # noqa: E402
from kvtune.policies.method_stack import MethodStack, parse_stack  # noqa: E402
from kvtune.policies.methods.quest import Quest  # noqa: E402
from kvtune.policies.plane import Plane, TokenCodec, TokenPlane  # noqa: E402

SHAPE = LayerShape(
    index=2, layers=4, query_heads=4, kv_heads=2, key_dim=8, value_dim=8, element_bytes=4
)


class TestQuest(MethodContract):
    samples = (
        "quest:page_tokens=4,budget_tokens=12,dense_layers=0",
        "quest:page_tokens=8,budget_tokens=16,dense_layers=1,group_reduce=mean",
        "streaming-llm:sink_tokens=6,window_tokens=14 + "
        "quest:page_tokens=4,budget_tokens=12,dense_layers=0",
        "chunkkv:budget_tokens=24,window_tokens=4,chunk_tokens=4 + "
        "quest:page_tokens=4,budget_tokens=12,dense_layers=0",
        "quest:page_tokens=4,budget_tokens=12,dense_layers=0 + vllm-int8-per-token-head",
    )
    exact = "quest:page_tokens=4,budget_tokens=64,dense_layers=0"
    ladder = (
        "quest:page_tokens=4,budget_tokens=8,dense_layers=0",
        "quest:page_tokens=4,budget_tokens=24,dense_layers=0",
        "quest:page_tokens=4,budget_tokens=48,dense_layers=0",
        "quest:page_tokens=4,budget_tokens=80,dense_layers=0",
    )


class Rounded(TokenCodec):
    """Rounds to halves."""

    def encode(self, x):
        return {"x": (x * 2).round().to(torch.int8)}

    def decode(self, held):
        return held["x"].float() / 2


class Flushing(Plane):
    """Rounds the oldest tokens away from zero, 5 at once, long after they came (as KIVI does)."""

    @property
    def tokens(self):
        return self.held["x"].shape[1] if self.held else 0

    def append(self, x):
        old = self.held.get("x", x[:, :0])
        self.held["x"] = torch.cat((old, x), dim=1)

    def read(self):
        x, old = self.held["x"], self.tokens // 5 * 5
        return torch.cat((x[:, :old].sign() * x[:, :old].abs().ceil(), x[:, old:]), dim=1)

    def clear(self):
        self.held = {}


class Store(StoreMethod):
    name = "rounding"
    axis = Axis.BITS
    flushing: bool = False

    def plane(self, ctx, inner):
        return Flushing() if self.flushing else TokenPlane(Rounded())

    def plane_bytes(self, shape, held, inner, observed=None):
        raise NotImplementedError


class DropFirst(TokenMethod):
    """Drops the oldest token in each step."""

    name = "drop-first"
    acts = "decode"

    def evictor(self, ctx):
        return _DropFirst()

    def history(self, seen, layer):
        return History(seen.tokens)

    def own_bytes(self, seen, layer):
        return 0


class _DropFirst(Evictor):
    def observe(self, seen, phase):
        pass

    def select(self, seen, phase):
        return torch.arange(1, seen.keys.shape[1])[None]


def layer(*methods, shape=SHAPE):
    return LayerCache(
        LayerSetup(
            shape=shape,
            stack=MethodStack(methods),
            rope=Rope(torch.tensor([1.0, 0.1, 0.01, 0.001])),
            scale=shape.key_dim**-0.5,
            softcap=None,
            window_tokens=None,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    )


def random(heads, count, seed):
    return torch.randn(heads, count, 8, generator=torch.Generator().manual_seed(seed))


def fill(cache, count):
    cache.prefill(
        random(4, count, 0), random(2, count, 1), random(2, count, 2), torch.arange(count)
    )
    cache.finish_prefill(None)


def step(cache, position):
    args = random(4, 1, 10 + position), random(2, 1, 40 + position), random(2, 1, 90 + position)
    return cache.decode(*args, torch.tensor([position]))


def by_hand(keys, page_tokens):
    """Least and greatest of each page, one page after another."""
    parts = keys.split(page_tokens, dim=1)
    return (
        torch.stack([part.amin(1) for part in parts], 1),
        torch.stack([part.amax(1) for part in parts], 1),
    )


def chooser(keys, **parameters):
    quest = Quest(dense_layers=0, **parameters)
    ctx = EvictorContext(SHAPE, 1.0, None, torch.float32, torch.device("cpu"))
    selector = quest.selector(ctx)
    selector.rebuild(keys)
    return selector


def test_a_planted_page_is_the_one_that_is_read_beside_the_latest():
    keys, queries = random(2, 70, 3), random(4, 1, 4)[:, 0]
    keys[0, 37] = 10 * queries[1]
    keys[1, 5] = 10 * queries[2]
    chosen = chooser(keys, page_tokens=16, budget_tokens=32).choose(queries, 70)
    assert chosen.tolist() == [
        [*range(32, 48), *range(64, 70)],
        [*range(0, 16), *range(64, 70)],
    ]


def test_the_latest_page_is_read_even_if_it_scores_least():
    keys = torch.ones(2, 9, 8)
    keys[:, 8] = -100.0
    chosen = chooser(keys, page_tokens=4, budget_tokens=8).choose(torch.ones(4, 8), 9)
    assert chosen.tolist() == [[0, 1, 2, 3, 8]] * 2


def test_equal_pages_are_read_from_the_oldest_on():
    chosen = chooser(torch.ones(2, 20, 8), page_tokens=4, budget_tokens=12).choose(
        torch.ones(4, 8), 20
    )
    assert chosen.tolist() == [[*range(8), *range(16, 20)]] * 2


def test_the_first_layers_read_everything_and_hold_no_summaries():
    quest = Quest(page_tokens=4, budget_tokens=8, dense_layers=3)
    cache = layer(quest)
    fill(cache, 50)
    step(cache, 50)
    assert cache.selector.tensors() == {}
    assert cache.read_bytes_per_step == 51 * 2 * SHAPE.slot_bytes
    assert quest.index_bytes(50, SHAPE) == 0
    assert quest.selected_tokens(50, SHAPE) == 50


@pytest.mark.parametrize("flushing", [False, True])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 23])
def test_summaries_are_of_what_the_store_reads_back_after_every_step(flushing, count):
    cache = layer(Quest(page_tokens=4, budget_tokens=8), Store(flushing=flushing))
    fill(cache, count)
    for position in range(count, count + 13):
        step(cache, position)
        low, high = by_hand(cache.groups[0].keys.read(), 4)
        assert torch.equal(cache.selector.low, low)
        assert torch.equal(cache.selector.high, high)


def test_an_eviction_rebuilds_the_summaries_of_the_survivors():
    cache = layer(Quest(page_tokens=4, budget_tokens=8), DropFirst())
    fill(cache, 21)
    for position in range(21, 26):
        step(cache, position)
        keys = cache.groups[0].keys.read()
        assert keys.shape[1] == 21
        low, high = by_hand(keys, 4)
        assert torch.equal(cache.selector.low, low)
        assert torch.equal(cache.selector.high, high)


@pytest.mark.parametrize("evictor", ["streaming-llm:sink_tokens=6,window_tokens=14", "full"])
def test_all_pages_of_what_an_eviction_left_give_the_answers_of_that_eviction(evictor):
    engine = tiny_engine()
    prompt, more = tokens(41), tokens(6, 1)
    alone, _ = follow(engine, parse_stack(evictor), prompt, more)
    text = f"{evictor} + quest:page_tokens=4,dense_layers=0,budget_tokens="
    every, _ = follow(engine, parse_stack(text + "48"), prompt, more)
    fewer, _ = follow(engine, parse_stack(text + "16"), prompt, more)
    assert torch.equal(every, alone)
    assert not torch.equal(fewer, alone)


@pytest.mark.parametrize("held", [31, 32, 33, 40, 47, 48, 49])
def test_a_step_touches_summaries_and_the_chosen_tokens_only(held):
    cache = layer(Quest(page_tokens=16, budget_tokens=32))
    fill(cache, held - 1)
    step(cache, held - 1)
    head_token_bytes = 2 * 8 * 4
    if held <= 32:
        expected = held * 2 * head_token_bytes
    else:
        pages = 3 if held <= 48 else 4
        chosen = 16 + held - (pages - 1) * 16
        expected = 2 * (chosen * head_token_bytes + pages * 2 * 8 * 4)
    assert cache.read_bytes_per_step == expected


def test_read_bytes_by_formula_are_those_touched_in_a_model():
    engine = tiny_engine()
    stack = MethodStack((Quest(page_tokens=16, budget_tokens=48, dense_layers=1),))
    for size in (46, 47, 48, 63, 64, 65, 200):
        _, sequence = follow(engine, stack, tokens(size), tokens(2, 1))
        expected = footprint(stack, engine.layers, size, 2)
        assert sequence.measured() == expected
    assert expected.read_bytes_per_step < expected.resident_bytes / 2


@pytest.mark.parametrize(
    "store",
    [
        "minicache",
        "kivi:bits=4,key_group_tokens=8,value_group_channels=16,residual_tokens=8",
        "palu",
        "paging:block_tokens=8",
    ],
)
def test_bytes_read_are_exact_over_stores_that_cannot_read_single_tokens_too(store):
    engine = tiny_engine()
    stack = ready(
        engine, parse_stack("quest:page_tokens=4,budget_tokens=12,dense_layers=0 + " + store)
    )
    for size, decoded in ((9, 1), (9, 9), (41, 3)):
        _, sequence = follow(engine, stack, tokens(size), tokens(decoded, 1))
        expected = footprint(stack, engine.layers, size, decoded, sequence.observed())
        assert sequence.measured() == expected


def test_summaries_of_a_half_precision_model_are_a_sixteenth_of_the_cache():
    shape = LayerShape(5, 32, 32, 8, 128, 128, 2)
    assert Quest().index_bytes(4096, shape) * 16 == 4096 * 8 * shape.slot_bytes


def test_a_budget_below_two_pages_is_refused():
    with pytest.raises(ValidationError, match="32 tokens"):
        Quest(budget_tokens=31)
