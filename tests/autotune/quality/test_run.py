"""A baseline is asked twice and once only, and what was answered is never asked again."""

import asyncio
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvtune.autotune.quality.answers import AGAIN_CONCURRENCY, CONCURRENCY, Questions
from kvtune.autotune.quality.run import QualityRun
from kvtune.autotune.quality.subjects import Opened, Subject
from kvtune.autotune.quality.wants import TooFew
from kvtune.autotune.reporting import Quiet
from kvtune.errors import EngineError, KvtuneError
from kvtune.policies.plugin_arguments import NOTHING
from kvtune.policies.plugin_config import PluginConfig, QuestConfig
from kvtune.profilers.quality.limits import Limit
from kvtune.profilers.quality.suite import Answer, Item, QualityMetric, Size, Suite, SuitePlan
from kvtune.profilers.quality.suites.yours import Yours
from kvtune.types import Failure, FailureClass


class Echo(Suite):
    """Items that are right when the answer repeats the prompt."""

    name, says = "echo", "nothing is repeated any more"
    metrics = (QualityMetric("right", "share", "higher", "difference", 0.05),)
    count = 150

    def items(self, plan):
        assert plan.max_tokens != 0
        return tuple(Item(f"{self.name}-{n}", "words", prompt=f"w{n}") for n in range(self.count))

    def figures(self, item, ours, theirs):
        return {"right": tuple(float(a.texts[0] == item.prompt) for a in (ours, theirs))}


class Second(Echo):
    name = "second"


class Told(Subject):
    """Answers that a function makes; counts how often it was opened and what it was asked."""

    def __init__(self, by, say=lambda item: item.prompt, *, key=True, max_tokens=None):
        self.by, self.say, self.max_tokens = by, say, max_tokens
        self.key = {"by": by} if key else None
        self.opened = 0
        self.asked = []
        self.died = None

    @contextmanager
    def open(self, reporter, on_progress):
        self.opened += 1
        yield Opened(self, {"engine": "9"}, (f"{self.by} is odd",), lambda: self.died)

    async def ask(self, items, *, seed, concurrency):
        self.asked.append(([item.key for item in items], seed, concurrency))
        await asyncio.sleep(0)
        return [Answer((self.say(item),), (1,), ("stop",)) for item in items]


def run(store, *suites, plan=None, **options):
    questions = Questions(suites or (Echo(),), plan or SuitePlan(seed=3))
    return QualityRun(questions, store, Quiet(), **options)


def test_the_baseline_is_asked_twice_with_other_seed_and_concurrency(store):
    base, ours = Told("base"), Told("ours")
    report = run(store).compare("m", base, ours)
    assert [(seed, at_once) for _, seed, at_once in base.asked] == [
        (3, CONCURRENCY),
        (4, AGAIN_CONCURRENCY),
    ]
    assert [(seed, at_once) for _, seed, at_once in ours.asked] == [(3, CONCURRENCY)]
    assert base.opened == 1
    assert report.outcome == "pass"
    assert report.figures[0].floor is not None
    assert (report.model, report.baseline, report.candidate) == ("m", "base", "ours")
    assert report.versions == {"engine": "9"}
    assert {"base is odd", "ours is odd"} <= set(report.warnings)
    assert [row.report for row in store.quality_reports()] == [report]


def test_a_baseline_beside_itself_is_asked_a_third_time(store):
    base = Told("base")
    run(store).compare("m", base, base)
    assert [(seed, at_once) for _, seed, at_once in base.asked] == [
        (3, CONCURRENCY),
        (4, AGAIN_CONCURRENCY),
        (3, CONCURRENCY),
    ]
    assert base.opened == 2


def test_a_file_that_cannot_be_used_starts_nothing(store, tmp_path):
    (tmp_path / "bad.jsonl").write_text("not json\n")
    base = Told("base")
    for name in ("bad.jsonl", "not-there.jsonl"):
        asking = run(store, Yours(), plan=SuitePlan(data=str(tmp_path / name)))
        with pytest.raises(KvtuneError, match=name):
            asking.compare("m", base, Told("ours"))
    assert base.opened == 0


def test_another_content_of_the_same_file_is_asked_again(store, tmp_path):
    file = tmp_path / "own.jsonl"
    for text in ("one", "two"):
        file.write_text(f'{{"prompt": "{text}"}}\n')
        base = Told("base")
        run(store, Yours(), plan=SuitePlan(data=str(file))).compare("m", base, Told("ours"))
        assert base.opened == 1


def test_a_candidate_that_lost_it_fails_with_both_answers(store):
    report = run(store).compare("m", Told("base"), Told("ours", lambda item: "something else"))
    assert report.outcome == "fail"
    assert report.samples[0].candidate == "something else"


def test_what_was_too_few_for_its_limits_is_a_warning_where_nothing_was_proved(store):
    limit = Limit("echo", Echo.metrics[0], 0.05)
    doubt = TooFew(limit, 300, 150, chance=0.6, where="1% of the answers change")
    asking = Questions((Echo(),), SuitePlan(), too_few=(doubt,))

    def sometimes(item):
        return "no" if item.prompt in ("w17", "w27", "w37", "w47") else item.prompt

    for ours, is_told in ((Told("right"), False), (Told("ours", sometimes), True)):
        report = QualityRun(asking, store, Quiet()).compare("m", Told("base"), ours)
        assert (report.outcome == "unclear") is is_told
        assert (str(doubt) in report.warnings) is is_told


def test_a_restart_comes_between_the_two_times(store):
    base = Told("base")
    run(store, restarts=True).compare("m", base, Told("ours"))
    assert base.opened == 2


def test_known_answers_start_nothing(store):
    run(store).compare("m", Told("base"), Told("ours"))
    base, other = Told("base"), Told("other")
    run(store).compare("m", base, other)
    assert (base.opened, other.opened) == (0, 1)


def test_what_is_known_of_who_answered_is_kept_with_the_answers(store):
    for _ in range(2):
        report = run(store).compare("m", Told("base"), Told("ours"))
        assert report.versions == {"engine": "9"}
        assert report.warnings == ("base is odd", "ours is odd")


def test_another_kvtune_asks_again(store, monkeypatch):
    run(store).compare("m", Told("base"), Told("ours"))
    monkeypatch.setattr("kvtune.__version__", "9999")
    base = Told("base")
    run(store).compare("m", base, Told("ours"))
    assert base.opened == 1


def test_only_suites_that_are_new_are_asked(store):
    run(store).compare("m", Told("base"), Told("ours"))
    base = Told("base")
    run(store, Echo(), Second()).compare("m", base, Told("ours"))
    assert {key.partition("-")[0] for keys, *_ in base.asked for key in keys} == {"second"}


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (SuitePlan(seed=4), {}),
        (SuitePlan(seed=3, size=Size.FULL), {}),
        (SuitePlan(seed=3, workload=("p",)), {}),
        (SuitePlan(seed=3), {"reuse": False}),
        (SuitePlan(seed=3), {"concurrency": 3}),
    ],
)
def test_what_was_asked_otherwise_is_asked_again(store, plan, options):
    run(store).compare("m", Told("base"), Told("ours"))
    base = Told("base")
    run(store, plan=plan, **options).compare("m", base, Told("ours"))
    assert base.opened == 1


def test_answers_to_items_that_have_changed_are_asked_again(store, monkeypatch):
    run(store).compare("m", Told("base"), Told("ours"))
    monkeypatch.setattr(Echo, "count", 140)
    base = Told("base")
    run(store).compare("m", base, Told("ours"))
    assert base.opened == 1


def test_answers_of_a_server_that_nobody_knows_are_not_kept(store):
    for _ in range(2):
        base = Told("base", key=False)
        run(store).compare("m", base, Told("ours", key=False))
        assert base.opened == 1


def test_a_suite_with_failed_items_is_not_kept(store):
    class Fails(Told):
        async def ask(self, items, *, seed, concurrency):
            return [Answer(error="HTTP 500")] * len(items)

    run(store).compare("m", Fails("base"), Told("ours"))
    base = Told("base")
    run(store).compare("m", base, Told("ours"))
    assert base.opened == 1


def test_an_interrupt_costs_only_the_suite_under_way(store):
    class Impatient(Told):
        async def ask(self, items, *, seed, concurrency):
            if items[0].key.startswith("second"):
                raise KeyboardInterrupt
            return await super().ask(items, seed=seed, concurrency=concurrency)

    with pytest.raises(KeyboardInterrupt):
        run(store, Echo(), Second()).compare("m", Impatient("base"), Told("ours"))
    base = Told("base")
    run(store, Echo(), Second()).compare("m", base, Told("ours"))
    first = [keys[0].partition("-")[0] for keys, *_ in base.asked]
    assert first == ["second", "echo", "second"]


def test_a_subject_that_died_says_so(store):
    ours = Told("ours")
    ours.died = Failure(failure=FailureClass.CRASH_UNDER_LOAD, message="it ended", fix="look")
    with pytest.raises(EngineError, match="it ended"):
        run(store).compare("m", Told("base"), ours)


class Sized(Echo):
    """One category fits any context, the other one only large ones."""

    def items(self, plan):
        long = () if (plan.max_tokens or 9000) < 800 else (Item("l", "long", prompt="p"),)
        return (*super().items(plan), *long)


def test_everybody_gets_items_for_the_smallest_context_and_the_rest_is_said(store):
    base, ours = Told("b", max_tokens=900), Told("o", max_tokens=700)
    report = run(store, Sized()).compare("m", base, ours)
    assert all("l" not in keys for keys, *_ in base.asked)
    assert report.warnings[-1] == "not asked, too long for 700 tokens: echo/long"
    report = run(store, Sized()).compare("m", base, Told("large", max_tokens=900))
    assert any("l" in keys for keys, *_ in base.asked)
    assert not any("too long" in warning for warning in report.warnings)


def test_progress_goes_on_over_batches(store, monkeypatch):
    monkeypatch.setattr("kvtune.profilers.quality.compare.BATCH_ITEMS", 50)
    told = []

    class Counting(Told):
        @contextmanager
        def open(self, reporter, on_progress):
            self.on_progress = on_progress
            with super().open(reporter, on_progress) as opened:
                yield opened

        async def ask(self, items, *, seed, concurrency):
            self.on_progress(len(items) // 2, len(items))
            return await super().ask(items, seed=seed, concurrency=concurrency)

    class Loud(Quiet):
        def asked(self, done, total):
            told.append(done)

    runner = QualityRun(Questions((Echo(),), SuitePlan()), store, Loud())
    runner.compare("m", Told("base"), Counting("ours"))
    assert told[-6:] == [25, 50, 75, 100, 125, 150]


class Scored(Echo):
    """Texts that are scored: as the baseline scores them."""

    name, scores = "scored", True
    metrics = (QualityMetric("kl", "nats", "lower", "level", 0.02, bounds=None, spread=0.002),)

    def figures(self, item, ours, theirs):
        return {"kl": (0.0, 0.0)}


QUEST = PluginConfig(quest=QuestConfig(budget_tokens=256))


@pytest.mark.parametrize(
    ("plugins", "limits", "outcome", "is_judged"),
    [
        ((QUEST, NOTHING), (), "pass", False),
        ((QUEST, NOTHING), (Limit("scored", Scored.metrics[0], 0.02),), "unclear", False),
        ((QUEST, QUEST), (Limit("scored", Scored.metrics[0], 0.02),), "pass", True),
        ((NOTHING, NOTHING), (Limit("scored", Scored.metrics[0], 0.02),), "pass", True),
    ],
)
def test_scores_that_cannot_show_what_differs_judge_nothing(
    store, plugins, limits, outcome, is_judged
):
    ours, base = Told("ours"), Told("base")
    ours.plugin, base.plugin = plugins
    asking = run(store, Echo(), Scored())
    asking.questions = replace(asking.questions, limits=limits)
    report = asking.compare("m", base, ours)
    assert report.outcome == outcome
    assert any(figure.suite == "scored" for figure in report.figures) is is_judged
    assert any(point.suite == "scored" for point in report.points) is is_judged
    assert ("Quest acts on answers alone" in report.skipped.get("scored", "")) is not is_judged
    assert any(figure.suite == "echo" for figure in report.figures)
