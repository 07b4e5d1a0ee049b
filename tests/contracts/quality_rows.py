"""Rows of quality figures, as a comparison of answers would make them."""

from kvtune.profilers.quality.figures import Row
from kvtune.profilers.quality.gate import judge
from kvtune.profilers.quality.suite import QualityMetric

RECALL = QualityMetric("recall", "share", "higher", "difference", 0.05)
LEAK = QualityMetric("leak", "share", "lower", "difference", 0.05)
KL = QualityMetric("kl", "nats", "lower", "level", 0.02, bounds=None, spread=0.002)
TOP1 = QualityMetric("top1", "share", "higher", "level", 0.9, bounds=None, spread=0.02)
AGREEMENT = QualityMetric("agreement", "share", "higher", "level", 0.7)
LENGTH = QualityMetric("log-ratio", "nats", "lower", "difference", 0.1, bounds=None)
RATING = QualityMetric("rating", "marks", "higher", "difference", 1.0, bounds=(0.0, 10.0))


def rows(values, metric=RECALL, category="single", suite="needle", again=None, headline=True):
    """A row for each (candidate, baseline); `again` are the second run's values."""
    return [
        Row(
            suite=suite,
            category=category,
            item=f"{category}-{number}",
            metric=metric,
            headline=headline,
            ours=ours,
            theirs=theirs,
            again=None if again is None else (again[number], theirs),
        )
        for number, (ours, theirs) in enumerate(values)
    ]


def changed(broken, mended, items, wrong=0):
    """(candidate, baseline) of right-or-wrong items; `wrong` ones stay wrong."""
    right = items - broken - mended - wrong
    return [
        *[(0.0, 1.0)] * broken,
        *[(1.0, 0.0)] * mended,
        *[(0.0, 0.0)] * wrong,
        *[(1.0, 1.0)] * right,
    ]


def figure_of(found, category="single", metric="recall", suite="needle"):
    [figure] = [
        each
        for each in found
        if (each.suite, each.category, each.metric) == (suite, category, metric)
    ]
    return figure


def judged(values, metric=RECALL, **more):
    return figure_of(judge(rows(values, metric, **more)), metric=metric.name)
