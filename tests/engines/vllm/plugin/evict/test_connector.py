"""The connector in the engine process, over vLLM's own KV-cache manager: told, freed, published."""

import importlib
import warnings
from types import SimpleNamespace

import pytest

from kvtune.engines.vllm.plugin.evict.orders import Ask, Choice, Eviction, Orders, mask_of
from kvtune.policies.plugin_config import PageEvictionConfig, PluginConfig, ProtectConfig

# Importing vLLM takes longer than all else here.
pytestmark = pytest.mark.integration

SIZE, POOL, CHUNK = 16, 40, 64
ASKED = PluginConfig(page_eviction=PageEvictionConfig(budget_tokens=64, window_tokens=24))
PROMPT = list(range(200))
# 13 pages, of which page 0 and pages 11 and 12 must stay; four stay.
GONE = [1, 2, 3, 5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module", autouse=True)
def vllm():
    """vLLM's own imports warn, and a warning is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.v1.core.kv_cache_manager")
        importlib.import_module("vllm.sampling_params")
        importlib.import_module("kvtune.engines.vllm.plugin.evict.connector")


class Server:
    """A manager, a connector, and a scheduler that serves one request at a time."""

    def __init__(self, asked=ASKED):
        import torch
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from kvtune.engines.vllm.plugin.evict.connector import EvictionConnector, attach
        from kvtune.engines.vllm.plugin.spec import policy_spec

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(SIZE, sha256)
        stock = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        group = KVCacheGroupSpec(["layer"], policy_spec(stock, asked, CHUNK))
        # vLLM keeps one page for itself, the null page.
        cache = KVCacheConfig(POOL + 1, [], [group])
        self.manager = KVCacheManager(cache, 4096, SIZE, SIZE, max_in_flight_tokens=CHUNK)
        config = SimpleNamespace(
            additional_config={"kvtune": asked.model_dump(exclude_none=True)},
            model_config=SimpleNamespace(max_model_len=4096),
        )
        attach(config)
        self.connector = EvictionConnector(config, KVConnectorRole.SCHEDULER, cache)
        self.connector.bind_kv_cache_manager(self.manager)

    def arrive(self, tokens, name="r", marks=None):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        extra = None if marks is None else {"kv_transfer_params": {"kvtune": marks}}
        params = SamplingParams(max_tokens=999, extra_args=extra)
        request = Request(name, list(tokens), params, None, block_hasher=self.hasher)
        self.connector.on_new_request(request)
        return request

    def pages(self, request):
        return self.manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]

    def admit(self, request):
        """Adopt what is published; return how many tokens that spares."""
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        self.step(request, hit, blocks)
        return hit

    def step(self, request, hit=0, blocks=None):
        """Schedule a chunk; return what the worker is told of it."""
        begin = request.num_computed_tokens + hit
        new = min(CHUNK, request.num_tokens - begin)
        assert self.manager.allocate_slots(request, new, hit, blocks) is not None
        request.num_computed_tokens = begin
        output = SimpleNamespace(num_scheduled_tokens={request.request_id: new})
        orders = self.connector.build_connector_meta(output).orders
        request.num_computed_tokens += new
        self.worker_decides(orders)
        return orders

    def worker_decides(self, orders):
        from kvtune.engines.vllm.plugin.evict.connector import Decisions

        masks = {ask.ticket: self.chosen(ask.choice) for ask in orders.asks.values() if ask.choice}
        output = SimpleNamespace(kv_connector_worker_meta=Decisions(masks) if masks else None)
        self.connector.update_connector_output(output)

    def chosen(self, choice):
        """What the worker chooses: `GONE` of the prompt of these tests, else the first pages."""
        if choice.count == len(GONE):
            return mask_of(GONE)
        return mask_of([page for page in range(99) if choice.among >> page & 1][: choice.count])

    def compute(self, request):
        """Compute what is left of the request, a chunk a step; return the last step's orders."""
        orders = None
        while request.num_computed_tokens < request.num_tokens:
            orders = self.step(request)
        return orders

    def answer(self, request, tokens):
        for token in tokens:
            request.append_output_token_ids(token)
            self.compute(request)

    def end(self, request):
        delayed, told = self.connector.request_finished_all_groups(request, ())
        assert not delayed
        self.manager.free(request)
        return told

    def serve(self, tokens, answer=()):
        """Serve a request to its end; return how many tokens were spared."""
        request = self.arrive(tokens, name="another")
        hit = self.admit(request)
        self.compute(request)
        self.answer(request, answer)
        self.end(request)
        return hit

    def free_pages(self):
        return self.manager.block_pool.get_num_free_blocks()


@pytest.fixture
def server():
    return Server()


def held(server, request):
    return [index for index, page in enumerate(server.pages(request)) if not page.is_null]


def test_the_worker_is_asked_for_the_row_of_the_prompts_last_page(server):
    request = server.arrive(PROMPT)
    server.admit(request)
    orders = server.compute(request)
    tail = server.pages(request)[12].block_id
    # The window begins at token 176, and the last chunk of 64 at token 192.
    choice = Choice(mask_of(range(1, 11)), 9)
    assert orders == Orders({tail: Ask(0, 192, 200, choice)})


def test_pages_that_go_are_free_when_the_next_token_is_scheduled(server):
    from kvtune.engines.vllm.plugin.counters import counters

    before = counters().get("evicted_tokens", cause="score")
    request = server.arrive(PROMPT)
    server.admit(request)
    server.compute(request)
    assert server.free_pages() == POOL - 13
    server.answer(request, [7])
    assert server.free_pages() == POOL - 4
    assert held(server, request) == [0, 4, 11, 12]
    assert counters().get("evicted_tokens", cause="score") - before == 9 * SIZE
    server.answer(request, range(20))
    assert held(server, request) == [0, 4, 11, 12, 13]
    server.end(request)
    assert server.free_pages() == POOL


def test_from_then_on_the_worker_is_told_what_is_gone(server):
    request = server.arrive(PROMPT)
    server.admit(request)
    server.compute(request)
    request.append_output_token_ids(7)
    orders = server.step(request)
    assert orders == Orders(
        evictions={server.pages(request)[12].block_id: (Eviction(200, mask_of(GONE)),)}
    )


def test_a_preempted_request_loses_the_same_pages_again(server):
    request = server.arrive(PROMPT)
    server.admit(request)
    server.compute(request)
    server.answer(request, [7, 8, 9])
    server.manager.free(request)
    request.num_computed_tokens = 0
    server.serve(range(1000, 1000 + POOL * SIZE - 50))  # takes what was published
    server.admit(request)
    orders = server.compute(request)
    assert list(orders.evictions.values()) == [(Eviction(200, mask_of(GONE)),)]
    assert len(held(server, request)) == 13
    server.answer(request, [10])
    assert held(server, request) == [0, 4, 11, 12]


def test_a_decision_about_a_request_that_ended_is_ignored(server):
    request = server.arrive(PROMPT)
    server.admit(request)
    orders = server.compute(request)
    server.end(request)
    server.worker_decides(orders)
    assert server.connector.ledger.evictions == {}
    assert server.free_pages() == POOL


def test_a_hit_leaves_the_windows_queries_to_be_computed(server):
    server.serve(PROMPT)
    # 12 pages are published; token 176, where the window begins, is the first of page 11.
    assert server.serve(PROMPT) == 11 * SIZE


def test_a_prompt_within_the_budget_is_reused_as_in_stock_vllm(server):
    server.serve(PROMPT[:30], answer=range(32))
    # Of 62 tokens, which are within the budget, three full pages; the answer's are among them.
    assert server.serve([*PROMPT[:30], *range(32)]) == 3 * SIZE


def test_published_is_the_prompt_and_nothing_that_was_computed_without_its_pages(server):
    answer = list(range(60))
    server.serve(PROMPT, answer)
    # 260 tokens have 16 full pages, and the window of this prompt begins on the last one.
    assert server.serve([*PROMPT, *answer, *range(60, 70)]) == 12 * SIZE


def test_a_session_that_is_preempted_still_publishes_only_what_saw_all_pages(server):
    request = server.arrive(PROMPT)
    server.admit(request)
    server.compute(request)
    server.answer(request, range(60))
    # As vLLM does when a session's next input comes: all that there is now is the prompt.
    request.num_prompt_tokens = request.num_tokens
    server.answer(request, range(60, 70))
    server.manager.free(request)
    request.num_computed_tokens = 0
    server.admit(request)
    server.compute(request)
    server.end(request)
    assert server.serve([*PROMPT, *range(70)]) == 12 * SIZE


def test_without_that_rule_others_would_use_what_saw_gaps(server, monkeypatch):
    from kvtune.engines.vllm.plugin.manager import PolicyManager

    monkeypatch.setattr(PolicyManager, "publishable_tokens", lambda *given: given[2])
    answer = list(range(60))
    server.serve(PROMPT, answer)
    assert server.serve([*PROMPT, *answer, *range(60, 70)]) > 12 * SIZE


def span_tokens():
    from kvtune.engines.vllm.plugin.counters import counters

    return [
        counters().get("span_tokens", span=span, kept=kept)
        for span in ("prefix", "marked", "rest")
        for kept in ("yes", "no")
    ]


def test_what_ended_requests_kept_is_counted_by_kind_of_span():
    server = Server(ASKED.model_copy(update={"protect": ProtectConfig(prefix_tokens=10)}))
    before = span_tokens()
    # Pages 2 and 3 are marked; with the others that must stay, they are all that does.
    request = server.arrive(PROMPT, marks={"protected_spans": [[40, 50]]})
    server.admit(request)
    server.chosen = lambda choice: choice.among
    server.compute(request)
    server.answer(request, [7])
    told = server.end(request)["kvtune"]["span_tokens"]
    # Pages 0, 2, 3, 11 and 12 hold 72 tokens of the prompt.
    assert told == {
        "prefix": {"seen": 10, "kept": 10},
        "marked": {"seen": 10, "kept": 10},
        "rest": {"seen": 180, "kept": 52},
    }
    grown = [now - then for now, then in zip(span_tokens(), before, strict=True)]
    assert grown == [10, 0, 10, 0, 52, 128]


def test_a_request_that_marks_nothing_is_told_nothing(server):
    request = server.arrive(PROMPT)
    server.admit(request)
    server.compute(request)
    assert server.end(request) is None


def test_marks_that_no_front_end_refused_do_no_harm(server, caplog):
    caplog.set_level("WARNING", logger="vllm.kvtune")
    request = server.arrive(PROMPT, marks={"protected_spans": [[40, 900]]})
    assert "goes unprotected: protected span [40, 900)" in caplog.text
    server.admit(request)
    server.compute(request)
    server.answer(request, [7])
    assert held(server, request) == [0, 4, 11, 12]


CONTINUOUS = PluginConfig(
    page_eviction=PageEvictionConfig(budget_tokens=64, window_tokens=16, method="h2o")
)


def test_while_it_decodes_a_request_holds_its_budget_and_the_page_that_it_begins():
    server = Server(CONTINUOUS)
    request = server.arrive(PROMPT[:40])
    server.admit(request)
    server.compute(request)
    most = 0
    for token in range(150):
        server.answer(request, [token])
        most = max(most, len(held(server, request)))
    assert most == 5
    # 190 tokens have 12 pages. The first and the latest stay; of the others, the first went.
    assert held(server, request) == [0, 9, 10, 11]
    server.end(request)
    assert server.free_pages() == POOL


def test_a_preempted_request_that_lost_pages_one_by_one_sees_again_what_it_saw():
    server = Server(CONTINUOUS)
    request = server.arrive(PROMPT[:40])
    server.admit(request)
    server.compute(request)
    server.answer(request, range(80))
    kept, evictions = held(server, request), server.connector.ledger.evictions["r"]
    assert [each.first_token for each in evictions] == [65, 81, 97, 113]
    server.manager.free(request)
    request.num_computed_tokens = 0
    assert server.admit(request) == 0
    orders = server.compute(request)
    assert list(orders.evictions.values()) == [evictions]
    assert not orders.asks
    server.answer(request, [7])
    assert held(server, request) == kept
    server.end(request)
    assert server.free_pages() == POOL


def test_what_was_generated_before_any_page_left_is_published():
    some = CONTINUOUS.page_eviction.model_copy(update={"scored_tokens": 16})
    server = Server(PluginConfig(page_eviction=some))
    answer = list(range(60))
    server.serve(PROMPT[:40], answer)
    # The fifth page is begun by token 64, and from token 65 on tokens see a gap.
    assert server.serve([*PROMPT[:40], *answer]) == 4 * SIZE
