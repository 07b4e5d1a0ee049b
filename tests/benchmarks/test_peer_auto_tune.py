"""What `auto_tune.sh` does: a grid of two levers, each at falling rates until the goal is met."""

from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from peer_auto_tune import meets, tune
from peer_search import Found

from kvtune.errors import EngineError
from kvtune.profilers.goal import parse_goal
from kvtune.types import FailureClass

GOAL = parse_goal("p95 ttft <= 1s")


@dataclass
class Servers:
    """Servers by formula: TTFT is 0.2 s for each request/s, and at most `capacity` get through.

    `capacity(arguments)` is None where a server does not start.
    """

    capacity: callable
    asked: list = field(default_factory=list)
    now_s: float = 0.0

    @contextmanager
    def start(self, arguments):
        self.now_s += 10
        self.most = self.capacity(arguments)
        if self.most is None:
            raise EngineError(FailureClass.DOES_NOT_FIT, "too large", "")
        yield self

    def replay(self, rate):
        self.now_s += 10
        self.asked.append(rate)
        if self.most == "dies":
            return None
        reached = self.most if rate is None else min(rate, self.most)
        return {"requests_per_s": reached, "ttft_p95_s": 0.2 * reached}


def tuned(servers, *, limit_s=1e9, widths=(4, 8), chunks=(512,)):
    return tune(
        servers.start,
        GOAL,
        widths=widths,
        chunks=chunks,
        left_s=lambda: limit_s - servers.now_s,
        found=Found({}, 0.0, 0, 0),
    )


def test_a_load_that_meets_the_goal_at_once_is_sent_no_slower():
    servers = Servers(lambda arguments: 4.5)
    best, _ = tuned(servers)
    assert servers.asked == [None, None]
    assert best.rate is None


def test_rates_fall_by_one_from_above_what_was_reached_until_the_goal_is_met():
    servers = Servers(lambda arguments: 7.5)
    best, _ = tuned(servers, widths=(4,))
    assert servers.asked == [None, 8.0, 7.0, 6.0, 5.0]
    assert (best.rate, best.requests_per_s) == (5.0, 5.0)


def test_the_most_requests_within_the_goal_win_and_the_first_of_equals():
    servers = Servers(lambda arguments: {4: 3.0, 8: 4.0, 16: 4.0}[arguments["max-num-seqs"]])
    best, found = tuned(servers, widths=(4, 8, 16))
    assert best.arguments == {"max-num-seqs": 8, "max-num-batched-tokens": 512}
    assert (found.launches, found.failed_launches) == (3, 0)


def test_what_does_not_start_is_counted_and_passed_over():
    servers = Servers(lambda arguments: 3.0 if arguments["max-num-seqs"] == 8 else None)
    best, found = tuned(servers)
    assert best.arguments["max-num-seqs"] == 8
    assert (found.launches, found.failed_launches) == (2, 1)


def test_what_does_not_get_through_is_not_chosen():
    best, found = tuned(Servers(lambda arguments: "dies"))
    assert best is None
    assert found.failed_launches == 0


@pytest.mark.parametrize(("limit_s", "launches"), [(0, 0), (1, 1), (20, 1), (21, 2)])
def test_nothing_begins_after_the_end(limit_s, launches):
    _, found = tuned(Servers(lambda arguments: 3.0), limit_s=limit_s, chunks=(512, 1024))
    assert found.launches == launches


def test_a_configuration_that_time_ran_out_on_is_not_chosen():
    best, _ = tuned(Servers(lambda arguments: 7.5), limit_s=30)
    assert best is None


def test_a_figure_that_is_missing_meets_nothing():
    assert not meets(GOAL, {})
    assert meets(GOAL, {"ttft_p95_s": 1.0})
