"""What a worker holds of a probed task's model."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_29_weights"
down_revision = "2026_11_29_retention"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it; 0: not counted."""
    op.add_column("weights", sa.Column("held_bytes", sa.BigInteger, nullable=False, server_default="0"))
