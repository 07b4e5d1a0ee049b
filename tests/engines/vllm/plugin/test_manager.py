"""vLLM's own KV-cache manager over the plugin's spec: what is held, freed and published."""

import importlib
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtune.policies.plugin_config import (
    PluginConfig,
    ProtectConfig,
    QuestConfig,
    StreamingLlmConfig,
)

# Importing vLLM takes longer than all else here.
pytestmark = pytest.mark.integration

SIZE = 16
CHUNK = 64
STREAMING = PluginConfig(streaming_llm=StreamingLlmConfig(window_tokens=40, sink_tokens=4))
QUEST = PluginConfig(quest=QuestConfig(pages=2))
# One page of sinks, three of window, four of a chunk and one that a chunk may begin inside.
BOUND = 9


@pytest.fixture(scope="module", autouse=True)
def vllm():
    """vLLM's own imports warn, and a warning is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.v1.core.kv_cache_manager")
        importlib.import_module("vllm.sampling_params")


class Server:
    """A manager with a pool of its own, and a scheduler that serves one request at a time."""

    def __init__(self, asked, pool=BOUND):
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )

        from kvtune.engines.vllm.plugin.spec import policy_spec

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(SIZE, sha256)
        stock = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self.spec = policy_spec(stock, asked, CHUNK)
        group = KVCacheGroupSpec(["layer"], self.spec)
        # vLLM keeps one page for itself, the null page.
        self.manager = KVCacheManager(
            KVCacheConfig(pool + 1, [], [group]), 4096, SIZE, SIZE, max_in_flight_tokens=CHUNK
        )
        self.pool = self.manager.block_pool
        self.most_held = 0

    def request(self, tokens, name="r"):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        return Request(
            name, list(tokens), SamplingParams(max_tokens=999), None, block_hasher=self.hasher
        )

    def pages(self, request):
        return self.manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]

    def begin(self, request):
        """Adopt what is published; return how many tokens that spares."""
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        self._step(request, hit, blocks)
        return hit

    def go_on(self, request):
        """Compute what is left of the request, a chunk a step."""
        while request.num_computed_tokens < request.num_tokens:
            self._step(request)

    def _step(self, request, hit=0, blocks=None):
        left = request.num_tokens - request.num_computed_tokens - hit
        new = min(CHUNK, left)
        first_time = blocks is not None
        allocated = self.manager.allocate_slots(
            request, new, hit, blocks, full_sequence_must_fit=first_time
        )
        assert allocated is not None, "a request that is alone must always be served"
        begin = request.num_computed_tokens + hit
        self.check_what_is_seen(request, begin, new)
        self.most_held = max(self.most_held, sum(not page.is_null for page in self.pages(request)))
        request.num_computed_tokens = begin + new

    def check_what_is_seen(self, request, begin, new):
        """Each token of the step finds every page that it attends to."""
        window = self.spec.sink_window
        pages = self.pages(request)
        for page in range(begin // SIZE, (begin + new - 1) // SIZE + 1):
            for seen in range(page + 1):
                is_dropped = window and window.sink_blocks <= seen < page - window.window_blocks
                assert is_dropped or not pages[seen].is_null

    def serve(self, tokens, answer=0):
        """Serve a request to its end; return how many tokens were spared."""
        request = self.request(tokens)
        hit = self.begin(request)
        self.go_on(request)
        for token in range(answer):
            request.append_output_token_ids(token)
            self.go_on(request)
        self.manager.free(request)
        return hit


def test_a_prompt_longer_than_the_pool_is_served_and_every_page_returns():
    server = Server(STREAMING)
    server.serve(range(1000), answer=100)
    assert server.most_held <= BOUND < 1000 // SIZE
    assert server.pool.get_num_free_blocks() == BOUND


@pytest.mark.parametrize(
    "changed", [{"sliding_window": 64}, {"attention_chunk_size": 64}, {"non_causal": True}]
)
def test_a_layer_that_does_not_see_all_that_precedes_is_refused(changed):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvtune.engines.vllm.plugin.spec import policy_spec
    from kvtune.errors import BadInput

    stock = FullAttentionSpec(
        block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32, **changed
    )
    with pytest.raises(BadInput, match="FullAttentionSpec"):
        policy_spec(stock, STREAMING, CHUNK)


def test_what_one_request_needs_is_what_vllm_sizes_the_pool_by():
    from types import SimpleNamespace

    config = SimpleNamespace(
        max_in_flight_tokens=CHUNK, model_config=SimpleNamespace(max_model_len=4096)
    )
    spec = Server(STREAMING).spec
    assert spec.max_memory_usage_bytes(config) == BOUND * spec.page_size_bytes


def test_layers_that_are_alike_share_one_group():
    spec = Server(STREAMING).spec
    assert type(spec).merge([spec, spec]) == spec


def test_published_is_what_was_computed_with_all_that_precedes_it():
    server = Server(STREAMING, pool=200)
    server.serve(range(1000))
    # Sinks, window and the first page behind them: five pages. The rest saw gaps.
    assert server.serve(range(1000)) == 5 * SIZE


def test_protected_tokens_stay_as_sinks_do():
    server = Server(STREAMING.model_copy(update={"protect": ProtectConfig(prefix_tokens=33)}), 200)
    request = server.request(range(1000))
    server.begin(request)
    server.go_on(request)
    held = [index for index, page in enumerate(server.pages(request)) if not page.is_null]
    # 33 tokens are three pages. 960 tokens were settled when the last step began, on page 60.
    assert held == [0, 1, 2, *range(57, 63)]


def test_under_quest_the_prompt_is_published_and_no_token_of_an_answer():
    server = Server(QUEST, pool=200)
    prompt = list(range(100))
    server.serve(prompt, answer=60)
    assert server.serve([*prompt, *range(60), 7]) == 96


def test_an_answer_that_became_part_of_a_sessions_prompt_is_still_not_published():
    server = Server(QUEST, pool=200)
    request = server.request(range(100))
    server.begin(request)
    server.go_on(request)
    for token in range(60):
        request.append_output_token_ids(token)
        server.go_on(request)
    # As vLLM does when a session's next input comes: all that there is now is the prompt.
    request.num_prompt_tokens = request.num_tokens
    request.append_output_token_ids(1)
    server.go_on(request)
    server.manager.free(request)
    assert server.serve([*range(100), *range(60), 1]) == 96


def test_a_preempted_request_is_computed_again_from_what_is_published():
    server = Server(STREAMING)
    request = server.request(range(500))
    server.begin(request)
    server.go_on(request)
    server.manager.free(request)
    request.num_computed_tokens = 0
    server.begin(request)
    server.go_on(request)
    server.manager.free(request)
    assert server.pool.get_num_free_blocks() == BOUND


def test_how_much_of_prompts_is_kept_is_counted_by_span_as_they_end(monkeypatch):
    from vllm.v1.request import RequestStatus

    from kvtune.engines.vllm.plugin.counters import Counters
    from kvtune.engines.vllm.plugin.evict import marks

    figures = Counters(None, {})
    monkeypatch.setattr(marks, "counters", lambda: figures)
    asked = STREAMING.model_copy(update={"protect": ProtectConfig(prefix_tokens=20)})
    server = Server(asked, pool=20)
    request = server.request(range(200))
    for status in (RequestStatus.PREEMPTED, RequestStatus.FINISHED_STOPPED):
        request.num_computed_tokens = 0
        server.begin(request)
        server.go_on(request)
        request.append_output_token_ids(0)
        server.go_on(request)
        request.status = RequestStatus.RUNNING
        if status is not RequestStatus.PREEMPTED:  # vLLM says so when its pages are gone
            request.status = status
        server.manager.free(request)
    server.serve(range(1000, 1030))

    def counted(span):
        return [figures.get("span_tokens", span=span, kept=kept) for kept in ("yes", "no")]

    # Pages 2 to 8 are between the sinks and the window of page 12, where the long one ends.
    assert (counted("prefix"), counted("rest")) == ([20, 0], [180 - 7 * SIZE, 7 * SIZE])
    assert counted("marked") == [0, 0]


families = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 400), st.integers(0, 40)), max_size=6
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(families, st.sampled_from([BOUND, 2 * BOUND, 8 * BOUND]))
def test_no_request_holds_more_than_its_bound_whatever_is_published_already(requests, pool):
    server = Server(STREAMING, pool)
    for family, length, answer in requests:
        server.serve([family * 10_000 + place for place in range(length)], answer)
    assert server.most_held <= BOUND
    assert server.pool.get_num_free_blocks() == pool
