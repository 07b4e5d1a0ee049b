"""The sampler behind ask and tell: crashes teach it, stops do not, and it goes on after a crash."""

import sqlite3

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from kvtune.autotune.limits import Also
from kvtune.autotune.search import Search
from kvtune.autotune.space import SearchSpace, SpaceKnob
from kvtune.errors import StoreError
from kvtune.policies.base import Knob
from kvtune.types import Harm


def knob(built, active_when=None):
    return SpaceKnob("policy", built, active_when, "because")


@pytest.fixture
def space():
    return SearchSpace(
        knobs=(
            knob(Knob.log2("block", 32, 256, default=128, unit="tokens", because="b")),
            knob(Knob.flag("prefix", default=True, because="b")),
            knob(
                Knob.choice("hash", ("sha256", "xxhash"), default="sha256", because="b"),
                {"prefix": (True,)},
            ),
            knob(Knob.span("watermark", 0.0, 0.2, default=0.0, unit="", because="b")),
            knob(Knob.span("seqs", 1, 64, default=64, unit="sequences", because="b")),
        ),
        refusals={},
    )


@pytest.fixture
def url(store):
    return store.url


def test_every_proposal_has_typed_values_of_the_space(space, url):
    search = Search("s", url, seed=1)
    for _ in range(12):
        proposal = search.ask(space)
        assert proposal.values["block"] in (32, 64, 128, 256)
        assert type(proposal.values["seqs"]) is int
        assert isinstance(proposal.values["watermark"], float)
        assert ("hash" in proposal.values) is (proposal.values["prefix"] is True)
        search.tell(proposal, float(proposal.values["block"]), [0.0])


def test_further_objectives_are_minimised_in_a_study_of_their_own(space, url):
    alone, front = Search("s", url, seed=1), Search("s", url, seed=1, also=tuple(Also))
    assert (alone.name, front.name) == ("s", "s-front-quality-memory")
    front.tell(front.ask(space), 2.0, [-0.5], [0.01, 64.0])
    front.tell_cut(front.ask(space), 1.0, 0.5)
    front.tell_failed(front.ask(space))
    for number in range(8):
        front.tell(front.ask(space), 1.0, [0.0], [0.02 * number, 70.0])
    kept = optuna.load_study(study_name=front.name, storage=url)
    assert [one.name for one in kept.directions] == ["MAXIMIZE", "MINIMIZE", "MINIMIZE"]
    assert [2.0, 0.01, 64.0] in [one.values for one in kept.best_trials]
    assert Search("s", url, seed=1, also=tuple(Also)).ask(space).optuna_number == 11


def test_points_named_first_are_proposed_first(space, url):
    search = Search("s", url, seed=1)
    first = {"block": 32, "prefix": False, "watermark": 0.1, "seqs": 7}
    search.suggest_first(space, first)
    assert search.ask(space).values == first


def test_a_point_of_a_smaller_space_moves_no_other_knob(space, url):
    wide = SearchSpace(
        (*space.knobs, knob(Knob.choice("dtype", ("auto", "a", "b"), default="auto", because=""))),
        {},
    )
    for seed in range(5):
        search = Search(f"s{seed}", url, seed=seed)
        search.suggest_first(space, space.defaults)
        first = search.ask(wide)
        assert first.values == wide.defaults
        search.tell_stopped(first)
        assert search.ask(wide).values == wide.defaults


def test_a_point_is_proposed_as_often_as_it_is_asked_for(space, url):
    search = Search("s", url, seed=1)
    point = {"block": 64, "prefix": False, "watermark": 0.1, "seqs": 7}
    for _ in range(2):
        proposal = search.ask_at(space, point)
        assert proposal.values == point
        search.tell(proposal, 1.0, [0.0])


def test_it_knows_what_waits_to_be_proposed(space, url):
    search = Search("s", url, seed=1)
    assert not search.has_queued
    search.suggest_first(space, {"block": 32, "prefix": False, "watermark": 0.1, "seqs": 7})
    assert search.has_queued
    search.tell_stopped(search.ask(space))
    assert search.has_queued, "what was stopped comes up again"
    search.tell(search.ask(space), 1.0, [0.0])
    assert not search.has_queued


def test_what_a_killed_search_left_open_comes_up_again(space, url):
    killed = Search("s", url, seed=1)
    left = killed.ask(space)
    again = Search("s", url, seed=1)
    again.recover()
    later = {"block": 32, "prefix": False, "watermark": 0.1, "seqs": 7}
    again.suggest_first(space, later)
    assert again.ask(space).values == left.values
    again.recover()
    assert again.ask(space).values == later, "what was named comes after it"
    assert again.ask(space).values != left.values, "what this search has open is not left over"


def test_a_stopped_proposal_comes_up_again(space, url):
    search = Search("s", url, seed=1)
    stopped = search.ask(space)
    search.tell_stopped(stopped)
    assert Search("s", url, seed=1).ask(space).values == stopped.values


def test_a_proposal_that_a_dead_process_left_open_is_closed(space, url):
    Search("s", url, seed=1).ask(space)
    search = Search("s", url, seed=1)
    search.recover()
    proposal = search.ask(space)
    assert proposal.optuna_number == 1
    search.tell(proposal, 1.0, [0.0])


def test_a_drawn_point_is_new_until_there_is_none(space, url):
    small = SearchSpace(space.knobs[:2], {})
    search = Search("s", url, seed=1)
    seen = []
    for _ in range(8):
        proposal = search.ask_new(small, lambda values: values not in seen)
        search.tell(proposal, 0.0, [0.0])
        assert proposal.values not in seen
        seen.append(proposal.values)
    assert search.ask_new(small, lambda values: values not in seen) is None


def test_the_sampler_keeps_away_from_a_region_that_crashes(space, url):
    """A tempting corner: the objective grows with seqs, and beyond 40 every server dies."""
    only_seqs = SearchSpace(space.knobs[4:], {})
    search = Search("s", url, seed=3)
    crashed = []
    best = 0.0
    for _ in range(40):
        proposal = search.ask(only_seqs)
        seqs = proposal.values["seqs"]
        crashed.append(seqs > 40)
        if seqs > 40:
            search.tell_failed(proposal)
        else:
            best = max(best, seqs)
            search.tell(proposal, float(seqs), [0.0])
    assert best >= 36
    assert sum(crashed[10:]) < 15, (
        "random search would crash 11 of 30, one that ignores crashes all"
    )


def test_a_missed_limit_counts_against_a_point(space, url):
    """Goodput grows with seqs, but beyond 20 the latency limit is missed."""
    only_seqs = SearchSpace(space.knobs[4:], {})
    search = Search("s", url, seed=5)
    late = []
    for _ in range(40):
        proposal = search.ask(only_seqs)
        seqs = proposal.values["seqs"]
        search.tell(proposal, float(seqs), [seqs / 20 - 1])
        late.append(seqs)
    assert sum(8 <= seqs <= 20 for seqs in late[10:]) > 15


def test_a_database_that_cannot_be_written_is_an_error_of_the_store(space, url):
    search = Search("s", url, seed=1)
    proposal = search.ask(space)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
        database.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="sampler's state cannot be written"):
            search.tell(proposal, 1.0, [0.0])
    database.close()


def test_two_searches_of_one_study_end_with_a_plain_error(space, url):
    first = Search("s", url, seed=1)
    proposal = first.ask(space)
    Search("s", url, seed=1).recover()
    with pytest.raises(StoreError, match="another search"):
        first.tell(proposal, 1.0, [0.0])


# --- what Optuna's own tools see ------------------------------------------------------------------

AS_OPTUNA_KNOWS_THEM = {
    "block": IntDistribution(0, 3),
    "prefix": CategoricalDistribution((False, True)),
    "hash": CategoricalDistribution(("sha256", "xxhash")),
    "watermark": FloatDistribution(0.0, 0.2),
    "seqs": IntDistribution(1, 64),
}
"""Numbers of a list are known by their place in it. What is stored stands: another distribution of
the same name would end every search that goes on, and mislead its sampler."""


def loaded(url):
    return optuna.load_study(study_name="s", storage=url)


def test_knobs_are_stored_as_ever(space, url):
    search = Search("s", url, seed=1)
    search.suggest_first(
        space, {"block": 64, "prefix": True, "hash": "xxhash", "watermark": 0.1, "seqs": 7}
    )
    search.tell(search.ask(space), 1.0, [0.0])
    (trial,) = loaded(url).trials
    assert trial.distributions == AS_OPTUNA_KNOWS_THEM
    assert trial.params == {
        "block": 1,
        "prefix": True,
        "hash": "xxhash",
        "watermark": 0.1,
        "seqs": 7,
    }


def test_a_study_of_before_goes_on(space, url):
    """Made by hand as the first kvtune made it, without words on what its trials are."""
    storage = optuna.storages.RDBStorage(url)
    study = optuna.create_study(study_name="s", storage=storage, direction="maximize")
    for block in (0, 1, 2, 3) * 3:
        params = {"block": block, "prefix": True, "hash": "sha256", "watermark": 0.0, "seqs": 64}
        study.add_trial(
            optuna.trial.create_trial(
                params=params, distributions=AS_OPTUNA_KNOWS_THEM, value=10.0 - block
            )
        )
    search = Search("s", url, seed=1)
    known = {"block": 64, "prefix": True, "hash": "sha256", "watermark": 0.0, "seqs": 64}
    assert not search.suggest_first(space, known)
    small = 0
    for _ in range(6):
        proposal = search.ask(space)
        small += proposal.values["block"] == 32
        search.tell(proposal, 10.0 - proposal.values["block"] / 32, [0.0])
    assert small >= 3, "what it measured before counts: small blocks served best"
    assert len(loaded(url).trials) == 18


def test_a_point_is_named_first_only_once(space, url):
    search = Search("s", url, seed=1)
    first = {"block": 32, "prefix": False, "watermark": 0.1, "seqs": 7}
    assert search.suggest_first(space, first)
    assert not search.suggest_first(space, first)
    search.tell(search.ask(space), 1.0, [0.0])
    assert not Search("s", url, seed=1).suggest_first(space, first)


def test_trials_carry_words_and_the_study_what_places_stand_for(space, url):
    search = Search("s", url, seed=1)
    said = {"settings": "block-size 32", "kvtune trial": 4, "seconds": 2.5, "why": None}
    proposal = search.ask(space)
    search.describe(proposal, said)
    search.tell_failed(proposal)
    study = loaded(url)
    assert study.trials[0].user_attrs == said
    assert study.user_attrs == {"block": "0: 32, 1: 64, 2: 128, 3: 256 tokens"}


def test_a_list_gets_longer_in_a_lossy_search_that_goes_on_with_the_same_study(url):
    def formats(harm, *choices):
        built = Knob.choice("dtype", ("auto", *choices), default="auto", because="b")
        return SearchSpace((SpaceKnob("policy", built, None, "because", harm),), {})

    near = formats(Harm.NEAR_LOSSLESS, "fp8")
    lossy = formats(Harm.LOSSY, "fp8", "int4")
    search = Search("s", url, seed=1)
    search.suggest_first(near, {"dtype": "fp8"})
    search.suggest_first(lossy, {"dtype": "int4"})
    asked = [search.ask(near), search.ask(lossy)]
    assert [proposal.values for proposal in asked] == [{"dtype": "fp8"}, {"dtype": "int4"}]
    for proposal in asked:
        search.tell(proposal, 1.0, [])
    kept = optuna.load_study(study_name="s", storage=url).get_trials()
    assert kept[0].params == {"dtype": "fp8"}, "what studies kept before must still be found"
