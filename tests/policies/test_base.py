import re
from pathlib import Path

import pytest
from contracts.policy_samples import engine, on_cpu, on_gpu
from hypothesis import given
from hypothesis import strategies as st

from kvtune.policies import base
from kvtune.policies.base import Knob, describe_range, policies, powers_of_two


def test_platform_is_what_the_engine_was_built_for():
    assert on_gpu(engine=engine("cpu")).platform == "cpu"
    assert on_gpu(engine=engine("simulated")).platform == "cuda"
    assert on_cpu(engine=engine("unknown")).platform == "cpu"


def test_powers_of_two_are_within_their_bounds():
    assert powers_of_two(3, 33) == (4, 8, 16, 32)
    assert powers_of_two(1, 1) == (1,)
    with pytest.raises(ValueError, match="no power of two"):
        powers_of_two(5, 7)


def test_a_default_outside_the_range_is_a_mistake_of_the_author():
    with pytest.raises(ValueError, match="block_size: default 48"):
        Knob.choice("block_size", (32, 64), default=48, because="x")
    with pytest.raises(ValueError, match="default 3000"):
        Knob.log2("tokens", 256, 8192, default=3000, unit="tokens", because="x")


@pytest.mark.parametrize(
    ("knob", "value", "nearest"),
    [
        (Knob.choice("k", (2, 4, 128), default=128, because="x"), 9, 4),
        (Knob.choice("k", (2, 4, 128), default=128, because="x"), 3, 2),
        (Knob.choice("k", (2, 4, 128), default=128, because="x"), "4", 128),
        (Knob.choice("k", ("a", "b"), default="a", because="x"), "c", "a"),
        (Knob.log2("k", 256, 8192, default=2048, unit="", because="x"), 1500, 1024),
        (Knob.flag("k", default=True, because="x"), 0, True),
        (Knob.span("k", 2, 9, default=5, unit="", because="x"), 12, 9),
        (Knob.span("k", 2, 9, default=5, unit="", because="x"), 3.6, 4),
        (Knob.span("k", 0.0, 0.5, default=0.0, unit="", because="x"), 0.7, 0.5),
    ],
)
def test_a_value_outside_the_range_becomes_the_nearest_one(knob, value, nearest):
    assert not knob.allows(value)
    assert knob.nearest(value) == nearest


def test_true_is_no_number_and_one_is_no_flag():
    assert not Knob.choice("k", (1, 2), default=1, because="x").allows(True)
    assert not Knob.flag("k", default=True, because="x").allows(1)
    assert not Knob.span("k", 1, 4, default=1, unit="", because="x").allows(True)
    assert not Knob.span("k", 1, 4, default=1, unit="", because="x").allows(2.0)


@given(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.floats(-9, 1e6)),
    st.sampled_from(
        [
            Knob.span("k", 2, 9, default=5, unit="", because="x"),
            Knob.span("k", 0.0, 0.5, default=0.25, unit="", because="x"),
            Knob.log2("k", 4, 64, default=8, unit="", because="x"),
            Knob.flag("k", default=False, because="x"),
            Knob.choice("k", ("auto", "fp8"), default="auto", because="x"),
        ]
    ),
)
def test_the_nearest_value_is_always_allowed(value, knob):
    assert knob.allows(knob.nearest(value))
    if knob.allows(value):
        assert knob.nearest(value) == value


def test_ranges_read_well():
    assert describe_range(Knob.span("k", 2, 9, default=5, unit="", because="x")) == "2..9"
    assert describe_range(Knob.flag("k", default=False, because="x")) == "on or off"
    assert describe_range(Knob.choice("k", (1, 2), default=1, because="x")) == "1, 2"
    log2 = Knob.log2("k", 4, 64, default=8, unit="", because="x")
    assert describe_range(log2) == "powers of two 4..64"


def test_policies_are_found_by_their_file():
    found = policies()
    assert found["block_size"].__module__ == "kvtune.policies.block_size"
    named = re.compile(r'^    name: ClassVar\[str\] = "(\w+)"', re.M)
    files = Path(base.__file__).parent.glob("*.py")
    assert set(found) == {name for file in files for name in named.findall(file.read_text())}
