"""In which order a surface is measured."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from contracts.surfaces_made import line_of, small_spec
from surface_order import REFERENCE_EVERY, STAGES, next_one, whole_s
from surface_spec import surfaces


def recorded(spec, *, fails=(), session_of=lambda n: 0, speed=lambda point: 1.0):
    """A whole recording of `spec`, and the kinds and points in their order."""
    lines = []
    while (chosen := next_one(spec, lines, session_of(len(lines)))) is not None:
        kind, point = chosen
        n = len(lines)
        failure = "crash-under-load" if point in fails and kind == "point" else None
        lines.append(
            line_of(n, kind, point, session=session_of(n), speed=speed(point), failure=failure)
        )
        assert n < 1000
    return lines


def test_every_point_is_measured_once_and_the_best_again():
    spec = small_spec()
    lines = recorded(spec, speed=lambda point: point[0] * point[1])
    points = [line.point for line in lines if line.kind == "point"]
    assert sorted(points) == sorted(set(spec.points()) - {spec.stock})
    repeats = [line.point for line in lines if line.kind == "repeat"]
    best = sorted(points, key=lambda point: -point[0] * point[1])
    expected = dict.fromkeys(points, 0)
    for stage in STAGES:
        for point in best[: stage.best]:
            expected[point] = max(expected[point], stage.repeats)
    assert Counter(repeats) == +Counter(expected)
    first_repeat = [line.kind for line in lines].index("repeat")
    assert "point" not in [line.kind for line in lines[first_repeat:]]


def test_the_best_without_limits_are_measured_again_too():
    spec = replace(small_spec(), goal="max goodput where p95 ttft <= 0.001ms")
    lines = recorded(spec, speed=lambda point: point[0] * point[1])
    best = sorted(spec.order(), key=lambda point: -point[0] * point[1])
    most = max(stage.repeats for stage in STAGES if not stage.limits)
    repeats = Counter(line.point for line in lines if line.kind == "repeat")
    assert [repeats[point] for point in best[:4]] == [most] * 4


def test_stock_comes_first_last_and_every_sixth_time():
    kinds = [line.kind for line in recorded(small_spec())]
    at = [index for index, kind in enumerate(kinds) if kind == "reference"]
    assert at[0] == 0
    assert at[-1] == len(kinds) - 1
    assert {after - before for before, after in pairwise(at[:-1])} == {REFERENCE_EVERY}


def test_a_session_begins_with_stock_and_goes_on_where_the_last_one_stopped():
    lines = recorded(small_spec(), session_of=lambda n: n // 10)
    firsts = [line for line in lines if line.n % 10 == 0]
    assert {line.kind for line in firsts} == {"reference"}
    whole = [line.point for line in recorded(small_spec()) if line.kind == "point"]
    assert [line.point for line in lines if line.kind == "point"] == whole


def test_what_failed_by_chance_is_tried_once_more():
    spec = small_spec()
    unlucky = spec.order()[3]
    lines = recorded(spec, fails={unlucky}, speed=lambda point: 1.0 if point != unlucky else 0.01)
    kinds = [line.kind for line in lines if line.point == unlucky]
    assert kinds == ["point", "repeat"]


def test_a_drifting_machine_does_not_decide_which_points_are_the_best():
    spec = small_spec()

    def speed(point):
        return point[0] * point[1]

    lines = []
    while (chosen := next_one(spec, lines, 0)) is not None:
        kind, point = chosen
        n = len(lines)
        # Twice as slow at the end as at the beginning.
        lines.append(line_of(n, kind, point, speed=speed(point) / (1 + n / 60)))
    best = sorted(spec.order(), key=lambda point: -speed(point))[:12]
    assert set(best) <= {line.point for line in lines if line.kind == "repeat"}


def test_the_whole_time_counts_points_references_and_repeats():
    spec = small_spec()
    whole = recorded(spec)
    told_s = whole_s(spec, whole[:20])
    assert abs(told_s - sum(line.wall_s for line in whole)) < 0.05 * told_s


def test_the_surfaces_hold_what_a_proof_needs():
    for spec in surfaces().values():
        assert len(spec.points()) >= 150
        assert len(spec.order()) == len(set(spec.order())) == len(spec.points()) - 1
        assert spec.arguments(spec.stock) == dict(spec.base_arguments)
        assert {request.output_tokens for request in spec.requests()}
