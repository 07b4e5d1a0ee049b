"""Which pages go, against the reference engine's ChunkKV, SnapKV and H2O on the same attention."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvtune.engines.vllm.plugin.evict.choice import page_scores, pages_to_drop  # noqa: E402
from kvtune.engines.vllm.plugin.evict.keys import KeyReader  # noqa: E402
from kvtune.engines.vllm.plugin.evict.orders import Choice, mask_of  # noqa: E402
from kvtune.engines.vllm.plugin.evict.scores import Keys, received  # noqa: E402
from kvtune.policies.eviction import EvictorContext, Seen, Span  # noqa: E402
from kvtune.policies.method import LayerShape  # noqa: E402
from kvtune.policies.methods.chunkkv import ChunkKV  # noqa: E402
from kvtune.policies.methods.h2o import H2O  # noqa: E402
from kvtune.policies.methods.snapkv import SnapKV  # noqa: E402
from kvtune.policies.page_budget import PageBudget  # noqa: E402
from kvtune.policies.plugin_config import PageEvictionConfig  # noqa: E402

WIDTH, WINDOW = 4, 8
CHUNKKV = PageEvictionConfig(budget_tokens=1, window_tokens=WINDOW)
SNAPKV = CHUNKKV.model_copy(update={"method": "snapkv"})
H2O_ASKED = CHUNKKV.model_copy(update={"method": "h2o"})


def prompt(tokens, heads, kv_heads, seed, spans=()):
    """What the reference sees of a prompt's end, and all queries."""
    random = torch.Generator().manual_seed(seed)
    queries = torch.randn(heads, tokens, WIDTH, generator=random) * 2
    keys = torch.randn(kv_heads, tokens, WIDTH, generator=random)
    shape = LayerShape(0, 1, heads, kv_heads, WIDTH, WIDTH, 4)
    ctx = EvictorContext(shape, WIDTH**-0.5, None, torch.float32, torch.device("cpu"), spans=spans)
    places = torch.arange(tokens)
    return Seen(queries, places, keys, keys, places[None], ctx)


def reference(method, seen):
    """The tokens that the reference engine keeps."""
    evictor = method.evictor(seen.ctx)
    evictor.observe(seen, "prefill")
    (kept,) = evictor.select(seen, "prefill").tolist()
    return kept


def scored(queries, keys, first_place, scale, page_tokens):
    """What the tokens of a cache get that holds `keys` [Hk, n, d] in order."""
    missing = -keys.shape[1] % page_tokens
    cache = torch.nn.functional.pad(keys, (0, 0, 0, missing)).unflatten(1, (-1, page_tokens))
    reader = KeyReader(torch.arange(page_tokens * WIDTH), page_tokens)
    pages = torch.arange(cache.shape[1])[None]
    held = Keys(cache.transpose(0, 1), reader, scale, None)
    return received(queries[None], pages, torch.tensor([first_place]), held)[0, : keys.shape[1]]


def ours(seen, budget, asked):
    """The tokens that are left, when the prompt came in two chunks."""
    tokens = seen.queries.shape[1]
    total = torch.zeros(tokens)
    for start, end in ((budget.first_scoring(tokens), tokens - 3), (tokens - 3, tokens)):
        queries, keys = seen.queries[:, start:end], seen.keys[:, :end]
        total[:end] += scored(queries, keys, start, seen.ctx.scale, budget.block_tokens)
    may_go = (1 << budget.pages(tokens)) - 1 & ~budget.stays(tokens)
    scores = page_scores(total, budget.block_tokens, asked)
    gone = set(pages_to_drop(scores, Choice(may_go, budget.excess(tokens, tokens))))
    return [place for place in range(tokens) if place // budget.block_tokens not in gone]


@settings(deadline=None)
@given(st.integers(40, 120), st.integers(1, 120), st.sampled_from([1, 4, 8]), st.integers(0, 9))
def test_chunkkv_keeps_what_the_reference_keeps_with_pages_as_chunks(tokens, wanted, size, seed):
    budget = PageBudget(3, WINDOW, size, budget_tokens=wanted, scored_tokens=WINDOW)
    if not budget.evicts(tokens):
        return
    tail = tokens - budget.first_window_page(tokens) * size
    old = budget.kept(tokens) - (budget.pages(tokens) - budget.first_window_page(tokens))
    if old == 0:
        return  # the reference refuses a budget for the window alone
    method = ChunkKV(budget_tokens=tail + old * size, window_tokens=WINDOW, chunk_tokens=size)
    seen = prompt(tokens, 4, 2, seed, spans=(Span(0, 3, protected=True),))
    assert ours(seen, budget, CHUNKKV) == reference(method, seen)


@settings(deadline=None)
@given(st.integers(40, 120), st.integers(WINDOW + 1, 120), st.integers(0, 9))
def test_snapkv_keeps_what_the_reference_keeps_with_pages_of_one_token(tokens, wanted, seed):
    budget = PageBudget(0, WINDOW, 1, budget_tokens=wanted, scored_tokens=WINDOW)
    if not budget.evicts(tokens):
        return
    method = SnapKV(budget_tokens=wanted, window_tokens=WINDOW)
    seen = prompt(tokens, 3, 1, seed)
    assert ours(seen, budget, SNAPKV) == reference(method, seen)


def test_a_page_is_worth_all_that_its_tokens_received():
    got = torch.tensor([0.1, 0.2, 0.0, 0.5, 0.0, 0.1, 0.1])
    assert page_scores(got, 3, CHUNKKV).tolist() == pytest.approx([0.3, 0.6, 0.1])


def test_to_snapkv_a_page_is_worth_its_best_token_and_the_window_nothing():
    asked = SNAPKV.model_copy(update={"window_tokens": 2, "kernel_tokens": 3})
    got = torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0, 3.0, 0.0, 0.0, 8.0, 8.0])
    # Smoothed over three: 0 3 3 3 1 1 1 0, and nothing for the window.
    assert page_scores(got, 4, asked).tolist() == pytest.approx([3.0, 1.0, 0.0])


def test_of_pages_of_the_same_worth_the_first_stays():
    assert pages_to_drop(torch.ones(6), Choice(0b011111, 3)) == [2, 3, 4]


@settings(deadline=None)
@given(
    st.integers(12, 40),
    st.integers(10, 24),
    st.integers(1, 9),
    st.integers(0, 40),
    st.integers(0, 9),
)
def test_h2o_holds_while_decoding_what_the_reference_holds_with_pages_of_one_token(
    prompt_tokens, wanted, recent, more, seed
):
    budget = PageBudget(0, recent, 1, budget_tokens=wanted, while_decoding=True)
    seen = prompt(prompt_tokens + more, 4, 1, seed)
    method = H2O(heavy_tokens=wanted - recent, recent_tokens=recent)
    evictor = method.evictor(seen.ctx)
    held = torch.arange(prompt_tokens)
    total, gone = torch.zeros(prompt_tokens + more), 0
    for end in range(prompt_tokens, prompt_tokens + more + 1):
        start = 0 if end == prompt_tokens else end - 1
        phase = "decode" if start else "prefill"
        if start:
            held = torch.cat((held, torch.tensor([start])))
        places = torch.arange(start, end)
        step = Seen(
            seen.queries[:, start:end], places, seen.keys[:, held], seen.keys[:, held],
            held[None], seen.ctx,
        )  # fmt: skip
        evictor.observe(step, phase)
        if (index := evictor.select(step, phase)) is not None:
            held = held[index[0]]
            evictor.survived(index)

        kept = [place for place in range(end) if not gone >> place & 1]
        got = scored(step.queries, seen.keys[:, kept], len(kept) - (end - start), seen.ctx.scale, 1)
        total[kept] += got
        if excess := budget.excess(prompt_tokens, end, gone):
            may_go = (1 << end) - 1 & ~gone & ~budget.stays(end)
            scores = page_scores(total[:end], 1, H2O_ASKED)
            gone |= mask_of(pages_to_drop(scores, Choice(may_go, excess)))
        assert [place for place in range(end) if not gone >> place & 1] == held.tolist()
