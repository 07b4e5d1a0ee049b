"""Forecasts: what levers were expected to do, and what the first trial that tried each found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import uuid4

from pydantic import JsonValue
from sqlalchemy import insert, select

from kvtune.store.connection import Database
from kvtune.store.reading import all_rows
from kvtune.store.rows import ForecastOutcomeRow, ForecastRow, now
from kvtune.store.schema import forecast_outcomes, forecasts
from kvtune.types import Forecast, fingerprint_of


class ForecastLog(Database):
    """The forecasts of a store."""

    def save_forecasts(self, subject: str, told: Iterable[Forecast]) -> None:
        """Keep forecasts for `subject`, which identifies the baseline and its load."""
        created_at = now()
        rows = [
            ForecastRow(
                id=uuid4().hex,
                created_at=created_at,
                subject=subject,
                point=_point(forecast.arguments) if forecast.served_by == "engine" else "",
                forecast=forecast,
            ).columns()
            for forecast in told
        ]
        if rows:
            with self.write() as connection:
                connection.execute(insert(forecasts), rows)

    def score_forecasts(
        self,
        subject: str,
        arguments: Mapping[str, JsonValue],
        measured: Mapping[str, tuple[float, float]],
        *,
        study: str,
        trial: int,
    ) -> int:
        """Note what a trial found; returns how many forecasts it is the first to measure.

        `measured` maps a metric to its value and to that of the study's baseline.
        """
        of_point = (
            select(forecasts)
            .outerjoin(forecast_outcomes)
            .where(
                forecasts.c.subject == subject,
                forecasts.c.point == _point(arguments),
                forecast_outcomes.c.forecast_id.is_(None),
            )
        )
        with self.write() as connection:
            rows = [
                ForecastOutcomeRow(
                    forecast_id=row.id,
                    created_at=now(),
                    study=study,
                    trial=trial,
                    measured=measured[row.forecast.metric][0],
                    measured_baseline=measured[row.forecast.metric][1],
                ).columns()
                for row in list(all_rows(connection, ForecastRow, of_point))
                if row.forecast.predicted is not None and row.forecast.metric in measured
            ]
            if rows:
                connection.execute(insert(forecast_outcomes), rows)
        return len(rows)

    def forecasts(self) -> list[Forecast]:
        """Every forecast, the newest first, with what was measured later."""
        newest = select(forecasts).order_by(forecasts.c.created_at.desc(), forecasts.c.id)
        with self.read() as connection:
            told = list(all_rows(connection, ForecastRow, newest))
            found = {
                row.forecast_id: row
                for row in all_rows(connection, ForecastOutcomeRow, select(forecast_outcomes))
            }
        return [_with_outcome(row.forecast, found.get(row.id)) for row in told]


def _point(arguments: Mapping[str, JsonValue]) -> str:
    return fingerprint_of(dict(arguments))


def _with_outcome(forecast: Forecast, found: ForecastOutcomeRow | None) -> Forecast:
    if found is None:
        return forecast
    return forecast.model_copy(
        update={
            "study": found.study,
            "measured": found.measured,
            "measured_baseline": found.measured_baseline,
        }
    )
