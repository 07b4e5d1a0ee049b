import pytest
from contracts.policy_samples import on_cpu, workload

from kvtune.policies.chunk_threshold import ChunkThreshold


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, "not known"),
        ({"fingerprint": workload(input_p95=1000.0)}, "at most 1000 tokens of the 2048"),
        ({"fingerprint": workload(input_p95=3000.0), "max_concurrency": 1}, "nobody to starve"),
        (
            {
                "fingerprint": workload(input_p95=3000.0),
                "base_arguments": {"enable-chunked-prefill": False},
            },
            "chunked prefill",
        ),
    ],
)
def test_it_is_refused_where_no_prompt_starves_another(facts, reason):
    assert reason in ChunkThreshold().supports(on_cpu(**facts)).reason


@pytest.mark.parametrize(
    ("input_p95", "base", "caps"),
    [
        (3000.0, {}, (0, 128, 256, 512, 1024)),
        (1100.0, {}, (0, 128, 256, 512, 1024)),
        (700.0, {"max-num-batched-tokens": 512}, (0, 128, 256)),
        (3000.0, {"max-num-batched-tokens": 512, "max-model-len": 128}, (0, 128)),
    ],
)
def test_caps_are_below_the_step_and_the_long_prompts(input_p95, base, caps):
    ctx = on_cpu(fingerprint=workload(input_p95=input_p95), base_arguments=base)
    (knob,) = ChunkThreshold().knobs(ctx)
    assert knob.choices == caps
    assert knob.default == 0
