"""Layers of a probed task's model with running statistics of batches."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_30_batch_norms"
down_revision = "2026_11_29_weights"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add their names; []: none are known."""
    op.add_column("weights", sa.Column("batch_norms_json", sa.Text, nullable=False, server_default="[]"))
