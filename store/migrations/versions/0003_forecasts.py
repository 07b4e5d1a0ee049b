"""What levers were expected to do, and what they did."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "kvtune_forecasts",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("point", sa.Text, nullable=False),
        sa.Column("forecast", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kvtune_forecasts"),
    )
    op.create_index("ix_kvtune_forecasts_subject_point", "kvtune_forecasts", ["subject", "point"])
    op.create_table(
        "kvtune_forecast_outcomes",
        sa.Column("forecast_id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("study", sa.Text, nullable=False),
        sa.Column("trial", sa.Integer, nullable=False),
        sa.Column("measured", sa.Float, nullable=False),
        sa.Column("measured_baseline", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("forecast_id", name="pk_kvtune_forecast_outcomes"),
        sa.ForeignKeyConstraint(
            ["forecast_id"],
            ["kvtune_forecasts.id"],
            name="fk_kvtune_forecast_outcomes_forecast_id",
        ),
    )
