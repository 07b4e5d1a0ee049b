"""Which tokens of a step are of answers, those of preempted requests among them."""

import sys
import types
from types import SimpleNamespace

import pytest
import torch

from kvtune.engines.vllm.plugin import prompts

# A chunk within a prompt, one across its end, one of an answer, the last token of a prompt, a step.
QUERIES, LENGTHS = [3, 4, 2, 1, 1], [10, 10, 10, 10, 10]
PROMPTS = [20, 8, 5, 10, 9]
STEP = SimpleNamespace(
    query_start_loc_cpu=torch.tensor([0, *QUERIES]).cumsum(0).int(),
    seq_lens_cpu_upper_bound=torch.tensor(LENGTHS).int(),
    is_prefilling=torch.tensor([True, True, False, True, False]),
)


@pytest.fixture
def runner(monkeypatch):
    """vLLM's model runner, whose step asks for answers as a builder in it does."""

    class GPUModelRunner:
        # Longer than the step: places that no request has.
        input_batch = SimpleNamespace(num_prompt_tokens_cpu_tensor=torch.tensor([*PROMPTS, 0, 0]))

        def _build_attention_metadata(self, **named):
            return prompts.answers(STEP).int().tolist()

    module = types.ModuleType("vllm.v1.worker.gpu_model_runner")
    module.GPUModelRunner = GPUModelRunner
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return GPUModelRunner


UNTOLD = [0, 0, 0, *[0] * 4, 0, 0, 0, 1]


def test_where_the_runner_says_how_long_prompts_are_each_token_is_known(runner):
    prompts.listen()
    found = runner()._build_attention_metadata(num_scheduled_tokens={"a": 1})
    assert found == [0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1]
    assert prompts.answers(STEP).int().tolist() == UNTOLD, "told for its own step alone"


@pytest.mark.parametrize(
    "named", [{}, {"num_scheduled_tokens": {"a": 1}, "ubatch_slices": [slice(0, 1)]}], ids=str
)
def test_what_a_dry_run_or_a_split_batch_computes_again_is_taken_for_a_prompt(runner, named):
    prompts.listen()
    assert runner()._build_attention_metadata(**named) == UNTOLD


def test_listening_twice_wraps_once_and_another_runner_is_left_alone(runner):
    prompts.listen()
    wrapped = runner._build_attention_metadata
    prompts.listen()
    assert runner._build_attention_metadata is wrapped
    del runner._build_attention_metadata
    prompts.listen()
    assert not hasattr(runner, "_build_attention_metadata")


def test_a_vllm_that_does_not_tell_prompts_is_taken_at_its_word():
    assert prompts.answers(SimpleNamespace(is_prefilling=None)) is None
