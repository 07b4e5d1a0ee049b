"""A study's evidence for a program: the same findings that its page shows."""

from __future__ import annotations

from kvtune.autotune.forecast.score import scores
from kvtune.autotune.report.study_findings import (
    confirmations,
    importance,
    knobs,
    margins,
    memory_front,
    progress,
    quality_front,
)
from kvtune.autotune.report.study_prices import failures, prices, rung_of
from kvtune.autotune.report.study_trail import trail
from kvtune.autotune.report.study_view import StudyView
from kvtune.autotune.strict_json import strict_json


def study_json(view: StudyView) -> str:
    """All findings as one JSON object; what is unknown, or no number, is null or an empty list."""
    points = [
        {
            "trial": point.number,
            "rung": rung_of(point),
            "settings": point.settings,
            "arguments": point.row.trial.stack.arguments,
            "standing": point.standing,
            "value": point.value,
            "why": point.why,
        }
        for point in view.points
    ]
    reports = [
        row.model_dump(mode="json", exclude={"report": {"points", "samples"}})
        for row in view.reports
    ]
    found = {
        "study": view.study,
        "objective": view.metric,
        "unit": view.unit,
        "decision": view.decision,
        "decided_at": view.decided_at or None,
        "config": view.config,
        "emitted": [
            row.model_dump(
                mode="json", include={"created_at", "trial", "format", "directory", "files"}
            )
            for row in view.emitted
        ],
        "points": points,
        "confirmation": confirmations(view),
        "verdict": None if view.profile is None else view.profile.profile.verdict,
        "trail": trail(view),
        "progress": progress(view),
        "memory_front": memory_front(view),
        "quality_front": quality_front(view),
        "importance": importance(view),
        "knobs": knobs(view),
        "margins": margins(view),
        "failures": failures(view),
        "prices": prices(view),
        "forecasts": view.forecasts,
        "forecast_scores": scores(view.forecasts),
        "quality": reports,
    }
    return strict_json(found)
