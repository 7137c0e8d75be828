"""What runs tell of standing still in the background, and of what no phase accounts for."""

import sqlalchemy as sa
from alembic import op

revision = "2026_12_07_standing"
down_revision = "2026_12_06_gpu_lacks"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Let a run hold both."""
    op.add_column("runs", sa.Column("background_end_seconds", sa.Double, nullable=True))
    op.add_column("runs", sa.Column("rest_seconds", sa.Double, nullable=True))
