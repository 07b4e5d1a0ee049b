"""What configurations answered, and quality reports."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "kvtune_quality_answers",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("answers", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kvtune_quality_answers"),
    )
    op.create_index(
        "ix_kvtune_quality_answers_key_created_at",
        "kvtune_quality_answers",
        ["key", "created_at"],
    )
    op.create_table(
        "kvtune_quality_reports",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("study_id", sa.String(32)),
        sa.Column("trial", sa.Integer),
        sa.Column("report", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kvtune_quality_reports"),
        sa.ForeignKeyConstraint(
            ["study_id"], ["kvtune_studies.id"], name="fk_kvtune_quality_reports_study_id"
        ),
    )
    op.create_index("ix_kvtune_quality_reports_study_id", "kvtune_quality_reports", ["study_id"])
