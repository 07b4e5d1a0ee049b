import pytest
from contracts.policy_samples import MIB, on_cpu

from kvtune.policies.watermark import Watermark


@pytest.mark.parametrize(
    ("blocks", "ratios"),
    [
        (22, (0.0, 0.05, 0.1, 0.2)),
        (9, (0.0, 0.2)),
        (10, (0.0, 0.1, 0.2)),
        (1000, (0.0, 0.02, 0.05, 0.1, 0.2)),
    ],
)
def test_only_shares_that_are_different_numbers_of_blocks_are_offered(blocks, ratios):
    ctx = on_cpu(base_arguments={"num-gpu-blocks-override": blocks})
    (knob,) = Watermark().knobs(ctx)
    assert knob.choices == ratios


def test_a_pool_too_small_for_any_share_has_nothing_to_search():
    assert Watermark().knobs(on_cpu(base_arguments={"num-gpu-blocks-override": 4})) == ()


def test_memory_in_bytes_counts_as_the_pool():
    (knob,) = Watermark().knobs(on_cpu(base_arguments={"kv-cache-memory-bytes": 64 * MIB}))
    assert knob.choices == (0.0, 0.05, 0.1, 0.2)


def test_one_request_at_a_time_is_always_admitted():
    assert not Watermark().supports(on_cpu(max_concurrency=1)).ok
