"""The first schema: studies, trials, attempts, measurements, decisions, profiles, emitted configs.

Written out and not taken from `kvtune.store.schema`, which moves on while this stays.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.String(32)
TIME = sa.String(32)


def upgrade() -> None:
    op.create_table(
        "kvtune_studies",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("kvtune_version", sa.String(64), nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("workload_name", sa.Text, nullable=False),
        sa.Column("goal", sa.Text, nullable=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("base_arguments", sa.Text, nullable=False),
        sa.Column("settings", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kvtune_studies"),
        sa.UniqueConstraint("name", name="uq_kvtune_studies_name"),
    )
    op.create_table(
        "kvtune_trials",
        sa.Column("study_id", ID, nullable=False),
        sa.Column("number", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("trial", sa.Text, nullable=False),
        sa.Column("optuna_number", sa.Integer),
        sa.Column("rung", sa.Integer),
        sa.PrimaryKeyConstraint("study_id", "number", name="pk_kvtune_trials"),
        sa.ForeignKeyConstraint(
            ["study_id"], ["kvtune_studies.id"], name="fk_kvtune_trials_study_id"
        ),
    )
    op.create_table(
        "kvtune_measurements",
        sa.Column("id", ID, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("details", sa.Text, nullable=False),
        sa.Column("figures", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kvtune_measurements"),
    )
    op.create_index(
        "ix_kvtune_measurements_key_created_at", "kvtune_measurements", ["key", "created_at"]
    )
    op.create_table(
        "kvtune_failures",
        sa.Column("measurement_id", ID, nullable=False),
        sa.Column("failure", sa.String(32), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("fix", sa.Text, nullable=False),
        sa.Column("log_excerpt", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("measurement_id", name="pk_kvtune_failures"),
        sa.ForeignKeyConstraint(
            ["measurement_id"],
            ["kvtune_measurements.id"],
            name="fk_kvtune_failures_measurement_id",
        ),
    )
    op.create_table(
        "kvtune_runs",
        sa.Column("measurement_id", ID, nullable=False),
        sa.Column("repeat", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("requests", sa.Integer, nullable=False),
        sa.Column("failed_requests", sa.Integer, nullable=False),
        sa.Column("run", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("measurement_id", "repeat", name="pk_kvtune_runs"),
        sa.ForeignKeyConstraint(
            ["measurement_id"], ["kvtune_measurements.id"], name="fk_kvtune_runs_measurement_id"
        ),
    )
    op.create_table(
        "kvtune_attempts",
        sa.Column("id", ID, nullable=False),
        sa.Column("study_id", ID, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("process", sa.Text, nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("ended_at", TIME),
        sa.Column("measurement_id", ID),
        sa.PrimaryKeyConstraint("id", name="pk_kvtune_attempts"),
        sa.ForeignKeyConstraint(
            ["study_id", "number"],
            ["kvtune_trials.study_id", "kvtune_trials.number"],
            name="fk_kvtune_attempts_study_id_number",
        ),
        sa.ForeignKeyConstraint(
            ["measurement_id"],
            ["kvtune_measurements.id"],
            name="fk_kvtune_attempts_measurement_id",
        ),
    )
    op.create_index("ix_kvtune_attempts_study_id_number", "kvtune_attempts", ["study_id", "number"])
    op.create_index("ix_kvtune_attempts_measurement_id", "kvtune_attempts", ["measurement_id"])
    op.create_table(
        "kvtune_decisions",
        sa.Column("id", ID, nullable=False),
        sa.Column("study_id", ID, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("decision", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kvtune_decisions"),
        sa.ForeignKeyConstraint(
            ["study_id"], ["kvtune_studies.id"], name="fk_kvtune_decisions_study_id"
        ),
    )
    op.create_index("ix_kvtune_decisions_study_id", "kvtune_decisions", ["study_id"])
    op.create_table(
        "kvtune_profiles",
        sa.Column("id", ID, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("profile", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kvtune_profiles"),
    )
    op.create_table(
        "kvtune_emitted",
        sa.Column("id", ID, nullable=False),
        sa.Column("study_id", ID),
        sa.Column("trial", sa.Integer, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("format", sa.Text, nullable=False),
        sa.Column("directory", sa.Text, nullable=False),
        sa.Column("files", sa.Text, nullable=False),
        sa.Column("config", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kvtune_emitted"),
        sa.ForeignKeyConstraint(
            ["study_id"], ["kvtune_studies.id"], name="fk_kvtune_emitted_study_id"
        ),
    )
    op.create_index("ix_kvtune_emitted_study_id", "kvtune_emitted", ["study_id"])
