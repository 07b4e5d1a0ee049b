"""Searches are replayed fairly, and judged by what is true."""

from random import Random

import pytest
from regret import replay, searches
from regret_product import replay_product
from regret_report import Results, html, interval, markdown
from regret_rivals import Greedy, methods
from surface_bench import Judge, Outcome, space_of, stock_of
from synthetic_surfaces import synthetic_surfaces

from kvtune.types import FailureClass

BY_NAME = {surface.name: surface for surface in synthetic_surfaces()}
TRIALS = 5


@pytest.fixture(scope="module")
def judges():
    return {name: Judge(surface) for name, surface in BY_NAME.items()}


@pytest.mark.parametrize("name", [name for name in methods() if name != "kvtune"])
def test_a_search_begins_with_stock_and_repeats_itself_with_the_same_seed(name, judges):
    surface = BY_NAME["pair"]
    first, again = (replay(surface, judges["pair"], methods()[name], 3, TRIALS) for _ in range(2))
    assert first.worth == again.worth
    assert len(first.worth) == len(first.walls_s) == TRIALS
    assert first.worth[0] == pytest.approx(judges["pair"].worth[stock_of(surface.axes)], abs=1e-5)


def test_kvtune_finds_what_simulations_alone_do_not(judges):
    found = [replay(BY_NAME["additive"], judges["additive"], methods()["kvtune"], 0, 12)]
    told = replay(BY_NAME["additive"], judges["additive"], methods()["forecast"], 0, 1)
    assert found[0].worth[-1] > told.worth[0]


def test_the_search_itself_is_replayed_and_meets_the_same_noise(judges):
    surface, judge = BY_NAME["crash-corner"], judges["crash-corner"]
    first, again = (replay_product(surface, judge, 3, TRIALS) for _ in range(2))
    model = replay(surface, judge, methods()["kvtune"], 3, TRIALS)
    assert first.worth == again.worth
    assert len(first.worth) == len(first.walls_s) == TRIALS
    assert first.worth[0] == model.worth[0]
    assert first.walls_s[0] == model.walls_s[0], "the same measurement of stock"
    assert first.worth[-1] > first.worth[0]
    assert set(searches()) == {"product", "product-whole", *methods()}


def test_all_searches_meet_the_same_noise(judges):
    seen = {}

    class Watching(methods()["random"]):
        name = "watching"

        def ask(self, trials_left):
            return (32, 8, 512, "auto")

        def tell(self, point, outcome, at_s):
            super().tell(point, outcome, at_s)
            seen.setdefault(self.__class__, []).append((point, dict(outcome.figures)))

    class Other(Watching):
        def ask(self, trials_left):
            return (32, 8, 512, "auto") if trials_left < 3 else (64, 8, 512, "auto")

    for method in (Watching, Other):
        replay(BY_NAME["flat"], judges["flat"], method, 5, 5)
    one, other = (
        [figures for point, figures in seen[method] if point == (32, 8, 512, "auto")]
        for method in (Watching, Other)
    )
    assert one[: len(other)] == other
    assert one[0] != one[1]


def test_failed_launches_are_counted_and_never_recommended(judges):
    surface = BY_NAME["crash-corner"]
    found = replay(surface, judges["crash-corner"], methods()["random"], 1, 20)
    assert found.failed
    assert min(found.worth) > 0


def test_a_search_that_has_measured_everything_ends(judges):
    class Once(methods()["random"]):
        name = "once"

        def ask(self, trials_left):
            return None

    found = replay(BY_NAME["flat"], judges["flat"], Once, 0, 10)
    assert len(found.walls_s) == 1
    assert len(found.worth) == 10


def test_random_search_measures_nothing_twice(judges):
    found = replay(BY_NAME["flat"], judges["flat"], methods()["random"], 0, 40)
    assert found.points == 40


def test_greedy_takes_a_ridge_of_levers_one_by_one():
    surface = BY_NAME["additive"]
    search = Greedy(surface, Random(0))
    point, order = stock_of(surface.axes), []
    for _ in range(15):
        order.append(point)
        search.tell(point, surface.measured(point, Random(f"{point}"), 0.0), 0.0)
        point = search.ask(1)
    moved = [
        {at for at, value in enumerate(point) if value != stock_of(surface.axes)[at]}
        for point in order
    ]
    # First the block alone, then the width on top of the best block.
    assert moved[1:4] == [{0}] * 3
    assert all(1 in levers for levers in moved[4:11])
    assert len({point[0] for point in order[4:11]}) == 1
    assert {point[3] for point in order[:14]} == {"auto"}


def test_what_fails_or_misses_a_limit_is_not_recommended():
    surface = BY_NAME["cliff"]
    search = methods()["random"](surface, Random(0))
    stock = stock_of(surface.axes)
    good = surface.figures(stock)
    over = {**good, "goodput_requests_per_s": 99.0, "ttft_p95_s": 3.1}
    search.tell(stock, _outcome(good), 0.0)
    search.tell((32, 2, 256, "auto"), _outcome(over), 0.0)
    search.tell((32, 2, 512, "auto"), _outcome({}, FailureClass.UNKNOWN), 0.0)
    assert search.recommended() == stock


def test_means_of_repeats_decide_not_the_luckiest_value():
    surface = BY_NAME["flat"]
    search = methods()["random"](surface, Random(0))
    for point, values in {(32, 2, 256, "auto"): (9.0, 1.0), (32, 2, 512, "auto"): (6.0,)}.items():
        for value in values:
            search.tell(point, _outcome({"goodput_requests_per_s": value}), 0.0)
    assert search.recommended() == (32, 2, 512, "auto")


@pytest.mark.parametrize("surface", BY_NAME.values(), ids=list(BY_NAME))
def test_made_up_surfaces_are_in_kvtunes_space_and_have_an_optimum(surface, judges):
    space = space_of(surface.axes, surface.context)
    assert {entry.knob.name: set(entry.knob.choices) for entry in space.knobs} == {
        axis.knob: set(axis.values) for axis in surface.axes
    }
    worth = judges[surface.name].worth
    assert 150 <= len(worth) <= 2048
    assert max(worth.values()) == 1.0
    assert worth[stock_of(surface.axes)] > 0


def test_results_are_kept_and_not_run_again(tmp_path, judges):
    surface = BY_NAME["flat"]
    found = [replay(surface, judges["flat"], methods()["random"], seed, 4) for seed in range(3)]
    results = Results().with_more(found, surface, {"random": "at random"})
    results.write(tmp_path / "r.json")
    kept = Results.read(tmp_path / "r.json")
    assert kept == results
    assert kept.has("flat", "random", 2, 4)
    assert not kept.has("flat", "random", 2, 5)
    assert not kept.has("flat", "random", 3, 4)
    longer = [replay(surface, judges["flat"], methods()["random"], 0, 6)]
    assert len(kept.with_more(longer, surface, {}).replays) == 3
    assert Results.read(tmp_path / "none.json") == Results()


def test_reports_name_every_search_and_surface(tmp_path, judges):
    results = Results()
    for name in ("flat", "pair"):
        found = [
            replay(BY_NAME[name], judges[name], methods()[method], seed, 3)
            for method in ("random", "grid")
            for seed in range(2)
        ]
        results = results.with_more(found, BY_NAME[name], {"random": "at random", "grid": "grid"})
    text = markdown(results)
    for word in ("## flat", "## pair", "## all surfaces", "| random |", "| grid |", "256 points"):
        assert word in text
    html(results, tmp_path / "r.html")
    assert "all surfaces" in (tmp_path / "r.html").read_text()


def test_an_interval_of_a_median_holds_it():
    values = [Random(seed).random() for seed in range(50)]
    low, high = interval(values)
    assert low < sorted(values)[25] < high
    assert interval([0.5] * 9) == (0.5, 0.5)


def _outcome(figures, failure=None):
    return Outcome(figures, 1.0, failure)
