"""What a search is told to hold answers to."""

from kvtune.autotune.limits import QualityRules
from kvtune.profilers.quality.limits import parse_limits
from kvtune.profilers.quality.suite import Size


def rules(*limits, size=Size.STANDARD):
    return QualityRules(parse_limits(limits), size)


def test_the_order_of_limits_is_no_other_study():
    one = rules("needle >= -1pt", "kl <= 0.02").settings()
    assert one == rules("kl <= 0.02", "needle >= -1pt").settings()
    assert one == {
        "limits": ["fidelity.kl <= 0.02nats", "needle.recall >= -1pt"],
        "size": "standard",
    }
    assert one != rules("needle >= -1pt").settings()
    assert one != rules("needle >= -1pt", "kl <= 0.02", size=Size.FULL).settings()
