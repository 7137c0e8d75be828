"""What agents have probed of tasks that nobody had run."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_22_weights"
down_revision = "2026_11_22_kin"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Keep how large a task's model is, and how quick a few steps of it were."""
    op.create_table(
        "weights",
        sa.Column("task_key", sa.String(80), nullable=False),
        sa.Column("region", sa.String(64), nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("parameters", sa.BigInteger, nullable=False),
        sa.Column("model_bytes", sa.BigInteger, nullable=False),
        sa.Column("steps_json", sa.Text, nullable=False),
        sa.Column("start_seconds", sa.Double, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("task_key", name="pk_weights"),
    )
