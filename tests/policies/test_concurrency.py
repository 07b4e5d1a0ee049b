import pytest
from contracts.policy_samples import MIB, on_cpu, workload
from hypothesis import given
from hypothesis import strategies as st

from kvtune.policies.concurrency import batch_widths, why_widths

SCARCE = {
    "base_arguments": {"kv-cache-memory-bytes": 64 * MIB},
    "fingerprint": workload(300.0, 500.0, 60.0),
}


@pytest.mark.parametrize(
    ("facts", "widths"),
    [
        ({"max_concurrency": 12}, (2, 3, 4, 6, 8, 128)),
        ({"max_concurrency": 12, **SCARCE}, (2, 3, 4, 6, 8, 128)),
        ({"max_concurrency": 3}, (2, 128)),
        ({"max_concurrency": 2}, (128,)),
        ({}, (16, 24, 32, 48, 64, 96, 128)),
        # The pool holds 7 typical requests, so no width above 56 binds.
        (SCARCE, (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 128)),
        # More than the stock batch wait: the widest covers the load.
        ({"max_concurrency": 200}, (16, 24, 32, 48, 64, 96, 128, 192, 256)),
        # ... but not where the pool holds too few of them.
        ({"max_concurrency": 200, **SCARCE}, (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 128)),
    ],
)
def test_widths_lie_around_what_the_load_and_the_pool_can_use(facts, widths):
    assert batch_widths(on_cpu(**facts), 128) == widths


@given(
    st.integers(1, 2048),
    st.one_of(st.none(), st.integers(1, 3000)),
    st.one_of(st.none(), st.integers(MIB, 4096 * MIB)),
)
def test_widths_ascend_and_no_two_of_them_cover_the_whole_load(stock, load, memory):
    base = {} if memory is None else {"kv-cache-memory-bytes": memory}
    widths = batch_widths(on_cpu(max_concurrency=load, base_arguments=base), stock)
    assert stock in widths
    assert list(widths) == sorted(set(widths))
    assert widths[0] >= min(2, stock)
    assert widths[-1] == stock or widths[-2] < (load or stock)
    assert [width for width in widths if stock > width >= (load or stock)] == []


def test_the_reason_says_what_is_known_and_what_is_not():
    known = why_widths(on_cpu(max_concurrency=12, **SCARCE))
    assert known == (
        "the load never has more than 12 requests in flight and the KV pool holds about 7 requests"
    )
    assert "neither" in why_widths(on_cpu())
