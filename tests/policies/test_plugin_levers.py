from dataclasses import replace

import pytest
from contracts.policy_samples import WITH_PLUGIN, engine, on_cpu, on_gpu, workload

from kvtune import __version__
from kvtune.policies.plugin_levers import (
    budgets_tokens,
    context_tokens,
    plugin_problem,
    prompt_tokens,
    why_all_is_kept,
    why_not_served,
)

LONG = workload(input_p95=5000.0, output_p50=60.0)


def on(**changes):
    return on_cpu(**{"engine": WITH_PLUGIN, "fingerprint": LONG, **changes})


def with_base(**arguments):
    return on(base_arguments={name.replace("_", "-"): value for name, value in arguments.items()})


def test_it_is_served_beside_the_same_kvtune_on_a_tested_vllm():
    assert why_not_served(on()) == ""
    assert plugin_problem(WITH_PLUGIN) is None


@pytest.mark.parametrize(
    ("changes", "why", "fix"),
    [
        ({"plugin": None, "python": None}, "not known whether", "the Python that runs vLLM -m pip"),
        ({"plugin": None, "python": "/v/python"}, "not installed", "/v/python -m pip install"),
        ({"plugin": "0.0.1", "python": "/v/python"}, "that of kvtune 0.0.1", "/v/python -m pip"),
        ({"name": "simulated"}, "in vLLM only", "tune on vLLM"),
    ],
)
def test_a_missing_plugin_comes_with_the_command_that_mends_it(changes, why, fix):
    found, mend = plugin_problem(WITH_PLUGIN.model_copy(update=changes))
    assert why in found
    assert fix in mend
    assert mend == "tune on vLLM" or mend.endswith(f"kvtune=={__version__}")


@pytest.mark.parametrize(
    ("ctx", "why"),
    [
        (on(engine=engine("cpu")), "not known whether kvtune's plugin is installed"),
        (on(engine=WITH_PLUGIN.model_copy(update={"tested": False})), "never tried with vLLM"),
        (on_gpu(engine=engine("cuda", plugin=__version__)), "on CPUs only"),
        (on(model=None), "every layer"),
        (with_base(tensor_parallel_size=2), "tensor-parallel-size is fixed"),
        (with_base(pipeline_parallel_size="2"), "pipeline-parallel-size is fixed"),
        (with_base(speculative_config={"model": "x"}), "speculative-config takes tokens back"),
        (with_base(kv_transfer_config={"kv_connector": "x"}), "kv-transfer-config brings in"),
        (on(base_arguments={"speculative-config.method": "ngram"}), "speculative-config takes"),
        (with_base(kv_offloading_size=4), "kv-offloading-size brings in"),
        (with_base(prefix_match_unit=16), "prefix-match-unit copies"),
        (with_base(kv_cache_dtype_skip_layers=["0"]), "kv-cache-dtype-skip-layers gives"),
        (with_base(kv_cache_dtype="int8_per_token_head"), "kv-cache-dtype int8_per_token_head"),
    ],
)
def test_it_is_refused_with_the_reason_where_the_plugin_cannot_serve(ctx, why):
    assert why in why_not_served(ctx)


def test_what_changes_nothing_refuses_nothing():
    assert not why_not_served(with_base(tensor_parallel_size=1, kv_offloading_size=0))
    assert not why_not_served(with_base(kv_cache_dtype="fp8_e5m2"))


@pytest.mark.parametrize(
    ("changes", "budgets"),
    [
        # 5,000 + 120 tokens; a sixteenth is 320, so 512 is the first power of two.
        ({}, (512, 1024, 2048, 4096)),
        ({"base_arguments": {"max-model-len": 2048}}, (256, 512, 1024)),
        ({"fingerprint": None}, (512, 1024, 2048, 4096)),  # the model's 8,192
        ({"base_arguments": {"block-size": 512}}, (1024, 2048, 4096)),
        ({"fingerprint": workload(input_p95=200.0, output_p50=20.0)}, ()),
        ({"fingerprint": workload(input_p95=216.0, output_p50=20.0)}, ()),
        ({"fingerprint": workload(input_p95=217.0, output_p50=20.0)}, (256,)),
    ],
)
def test_budgets_are_powers_of_two_from_a_sixteenth_of_the_context_up(changes, budgets):
    assert budgets_tokens(on(**changes)) == budgets


def test_a_context_is_what_long_requests_reach_and_no_more_than_what_is_served():
    assert context_tokens(on()) == 5120
    assert context_tokens(with_base(max_model_len=1000)) == 1000
    assert context_tokens(replace(on(), model=None, fingerprint=None)) is None


def test_short_requests_are_a_reason_not_to_try():
    short = on(fingerprint=workload(input_p95=100.0, output_p50=20.0))
    assert "140 tokens are too short" in why_all_is_kept(short)
    assert why_all_is_kept(on()) == ""
    nothing = replace(on(), model=None, fingerprint=None)
    assert why_all_is_kept(nothing) == "it is not known how long requests are"


def test_long_prompts_are_those_of_the_load_as_far_as_they_are_served():
    assert prompt_tokens(on()) == 5000
    assert prompt_tokens(with_base(max_model_len=1000)) == 1000
    assert prompt_tokens(on(fingerprint=None)) == 8192
    assert prompt_tokens(replace(on(), model=None, fingerprint=None)) is None
