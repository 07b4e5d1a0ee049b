import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import BadGoal
from kvtune.profilers.quality.limits import (
    ANY,
    BROKEN_OUTPUT,
    Limit,
    find_limit,
    limit_text,
    parse_limits,
)
from kvtune.profilers.quality.suite import QualityMetric, Suite

RECALL = QualityMetric("recall", "share", "higher", "difference", 0.05)
FOLLOWED = QualityMetric("followed", "share", "higher", "difference", 0.05)
LEAK = QualityMetric("leak-recall", "share", "lower", "difference", 0.05)
KL = QualityMetric("kl", "nats", "lower", "level", 0.02, bounds=None)
TOP1 = QualityMetric("top1", "share", "higher", "level", 0.9)
RATIO = QualityMetric("log-ratio", "nats", "lower", "difference", 0.1, bounds=None)


def suite(given_name, *given_metrics):
    class Named(Suite):
        name = given_name
        says = "nothing"
        metrics = given_metrics

        def items(self, plan):
            return ()

        def figures(self, item, ours, theirs):
            return {}

    return Named()


SUITES = {
    each.name: each
    for each in (
        suite("needle", RECALL),
        suite("multi-turn", RECALL),
        suite("instructions", FOLLOWED),
        suite("leakage", LEAK, FOLLOWED),
        suite("fidelity", KL, TOP1),
        suite("length-shift", RATIO),
    )
}


def test_categories_of_the_user_are_found_in_any_case():
    limits = read("needle/Billing >= -1pt")
    found = find_limit(limits, "needle", "recall", "Billing", pooled=False)
    assert found is limits[0]
    assert find_limit(limits, "needle", "recall", "Bill", pooled=False) is None


def read(*texts):
    return parse_limits(texts, SUITES)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("needle >= -1pt", Limit("needle", RECALL, 0.01)),
        ("needles>=-1 pts", Limit("needle", RECALL, 0.01)),
        ("needle >= -1%", Limit("needle", RECALL, 0.01)),
        ("needle > -0.01", Limit("needle", RECALL, 0.01)),
        ("kl <= 0.02", Limit("fidelity", KL, 0.02)),
        ("KL < .5 nats", Limit("fidelity", KL, 0.5)),
        ("fidelity <= 0.02", Limit("fidelity", KL, 0.02)),
        ("top1 >= 97%", Limit("fidelity", TOP1, 0.97)),
        ("fidelity.top1 >= 0.97", Limit("fidelity", TOP1, 0.97)),
        ("worst-instruction >= -2pt", Limit("instructions", FOLLOWED, 0.02)),
        ("mean-instructions >= -2pt", Limit("instructions", FOLLOWED, 0.02, pooled=True)),
        ("mean-fidelity.kl <= 0.1", Limit("fidelity", KL, 0.1, pooled=True)),
        ("multi_turn >= -12.5pt", Limit("multi-turn", RECALL, 0.125)),
        (
            "multi-turn/second-question >= -5pt",
            Limit("multi-turn", RECALL, 0.05, "second-question"),
        ),
        ("leakage/roleplay.followed >= -5pt", Limit("leakage", FOLLOWED, 0.05, "roleplay")),
        ("leakage <= 2pt", Limit("leakage", LEAK, 0.02)),
        ("leak-recall <= +2pt", Limit("leakage", LEAK, 0.02)),
        ("length-shift <= 0.2", Limit("length-shift", RATIO, 0.2)),
        ("broken-output <= 3pt", Limit(ANY, BROKEN_OUTPUT, 0.03)),
    ],
)
def test_limit_is_read(text, limit):
    assert read(text) == (limit,)


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("good answers", "not a quality limit", '"needle >= -1pt"'),
        ("needel >= -1pt", "unknown suite or metric 'needel'", "did you mean 'needle'"),
        ("needle.recal >= -1pt", "unknown metric of needle 'recal'", "did you mean 'recall'"),
        ("recall >= -1pt", "metric of needle and multi-turn", '"needle.recall"'),
        ("needle <= -1pt", "recall is higher when better, got '<='", '"needle >= -5pt"'),
        ("kl >= 0.02", "kl is lower when better, got '>='", '"kl <= 0.02nats"'),
        ("needle >= 1pt", "above 0", '"needle >= -5pt"'),
        ("needle >= 0pt", "above 0", '"needle >= -5pt"'),
        ("kl <= 0", "above 0", '"kl <= 0.02nats"'),
        ("needle >= -1", "no unit", '"-1pt"'),
        ("top1 >= 97", "no unit", '"97%"'),
        ("needle >= -1ms", "unknown unit 'ms'", "recall is in pt"),
        ("kl <= 2%", "unknown unit '%'", "kl is in nats"),
        ("needle == -1pt", "got '=='", ">="),
    ],
)
def test_bad_limit_is_refused_with_the_fix(text, message, fix):
    with pytest.raises(BadGoal) as caught:
        read(text)
    assert message in caught.value.message
    assert fix in caught.value.fix


def test_several_limits_are_read_from_one_text_or_many():
    expected = (Limit("needle", RECALL, 0.01), Limit("fidelity", KL, 0.02))
    assert read("needle >= -1pt", "kl <= 0.02") == expected
    assert read("needle >= -1pt and kl <= 0.02") == expected
    assert read("needle >= -1pt, worst-needle >= -1pt, kl <= 0.02") == expected


def test_two_limits_for_the_same_are_refused():
    with pytest.raises(BadGoal, match="two limits for the same"):
        read("needle >= -1pt", "worst-needle >= -2pt")


def test_every_shipped_suite_can_be_named():
    from kvtune.profilers.quality.suite import suites

    for name, shipped in suites().items():
        for metric in shipped.metrics:
            limit = Limit(name, metric, metric.limit)
            assert parse_limits([limit_text(limit)]) == (limit,)


@given(
    st.sampled_from([(each.name, metric) for each in SUITES.values() for metric in each.metrics]),
    st.decimals("0.0001", "0.99", places=4),
    st.sampled_from([None, "second-question", "0-512"]),
    st.booleans(),
)
def test_written_limit_reads_back(target, value, category, pooled):
    limit = Limit(target[0], target[1], float(value), None if pooled else category, pooled=pooled)
    assert read(limit_text(limit)) == (limit,)


def test_the_most_specific_limit_is_found():
    each = Limit("needle", RECALL, 0.05)
    own = Limit("needle", RECALL, 0.01, "single")
    together = Limit("needle", RECALL, 0.02, pooled=True)
    limits = [each, own, together]
    assert find_limit(limits, "needle", "recall", "single", pooled=False) is own
    assert find_limit(limits, "needle", "recall", "other", pooled=False) is each
    assert find_limit(limits, "needle", "recall", "", pooled=True) is together
    assert find_limit([each, own], "needle", "recall", "", pooled=True) is each
    assert find_limit([own, together], "needle", "recall", "other", pooled=False) is None
    assert find_limit(limits, "fidelity", "kl", "0-512", pooled=False) is None
