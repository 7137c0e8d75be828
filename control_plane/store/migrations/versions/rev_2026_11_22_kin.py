"""What is history of a task holds for other batches, and for other code of that name."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_22_kin"
down_revision = "2026_11_22_users"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Know the batch of a run, and which tasks it says something about besides its own. Runs of before are forgotten:
    their keys cannot be told from what was stored."""
    op.add_column("runs", sa.Column("kin_key", sa.String(80), nullable=False, server_default=""))
    op.add_column("runs", sa.Column("batch", sa.Integer, nullable=False, server_default="0"))
    op.create_index("ix_runs_kin_key", "runs", ["kin_key"])
