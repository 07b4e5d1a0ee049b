"""What a search said on the way to its decision."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "kvtune_steps",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("study_id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("step", sa.String(16), nullable=False),
        sa.Column("says", sa.Text, nullable=False),
        sa.Column("trial", sa.Integer),
        sa.PrimaryKeyConstraint("id", name="pk_kvtune_steps"),
        sa.ForeignKeyConstraint(
            ["study_id"], ["kvtune_studies.id"], name="fk_kvtune_steps_study_id"
        ),
    )
    op.create_index("ix_kvtune_steps_study_id", "kvtune_steps", ["study_id"])
