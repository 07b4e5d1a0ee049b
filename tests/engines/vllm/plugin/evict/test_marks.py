"""What a front-end answers to marks that cannot be kept."""

import importlib
import warnings
from types import SimpleNamespace

import pytest

# Importing vLLM takes longer than all else here.
pytestmark = pytest.mark.integration


@pytest.fixture
def process(monkeypatch):
    """A front-end's way in, which takes requests as they are, with our check around it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("vllm.v1.engine.input_processor")

    from kvtune.engines.vllm.plugin.evict.marks import refuse_bad_marks

    monkeypatch.setattr(module.InputProcessor, "process_inputs", lambda self, request: request)
    refuse_bad_marks()
    refuse_bad_marks()

    def process(asked, spans, tokens=range(100), embeds=None):
        config = SimpleNamespace(additional_config={"kvtune": asked})
        extra = {"kv_transfer_params": {"kvtune": {"protected_spans": spans}}}
        request = SimpleNamespace(
            prompt_token_ids=tokens,
            prompt_embeds=embeds,
            sampling_params=SimpleNamespace(extra_args=extra),
        )
        server = SimpleNamespace(vllm_config=config)
        return module.InputProcessor.process_inputs(server, request) is request

    return process


EVICTING = {"page_eviction": {"budget_tokens": 64}}
STREAMING = {"streaming_llm": {"window_tokens": 64}}


def test_what_can_be_kept_passes(process):
    assert process(EVICTING, [[0, 10], [90, 100]])


def test_a_prompt_of_embeddings_is_as_long_as_they_are(process):
    assert process(EVICTING, [[90, 100]], tokens=None, embeds=range(100))


@pytest.mark.parametrize(
    ("asked", "spans", "why"),
    [
        (EVICTING, [[90, 101]], "not within the prompt"),
        (EVICTING, "all", "protected_spans"),
        (STREAMING, [[0, 10]], "streaming_llm drops pages by their place"),
    ],
)
def test_what_cannot_is_an_error_of_the_client(process, asked, spans, why):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=f"kvtune: .*{why}.* To fix: ") as caught:
        process(asked, spans)
    assert caught.value.parameter == "kv_transfer_params"


@pytest.mark.parametrize("asked", [{}, {"quest": {"pages": 8}}])
def test_where_nothing_is_dropped_nothing_is_checked(process, asked):
    assert process(asked, [[90, 101]])


def test_requests_without_sampling_pass(process):
    from vllm.v1.engine.input_processor import InputProcessor

    config = SimpleNamespace(additional_config={"kvtune": EVICTING})
    request = SimpleNamespace(prompt_token_ids=[1], prompt_embeds=None, sampling_params=None)
    assert InputProcessor.process_inputs(SimpleNamespace(vllm_config=config), request) is request
