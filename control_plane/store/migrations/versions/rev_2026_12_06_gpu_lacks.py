"""Regions in which a probe did not fit into the GPU's memory."""

import sqlalchemy as sa
from alembic import op

revision = "2026_12_06_gpu_lacks"
down_revision = "2026_12_05_labels"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; {}: none is known."""
    op.add_column("weights", sa.Column("gpu_lacks_json", sa.Text, nullable=False, server_default="{}"))
