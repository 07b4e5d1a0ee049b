"""What devices reach in memory bandwidth and matrix rate."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "kvtune_ceilings",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("ceilings", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kvtune_ceilings"),
    )
    op.create_index(
        "ix_kvtune_ceilings_device_created_at", "kvtune_ceilings", ["device", "created_at"]
    )
