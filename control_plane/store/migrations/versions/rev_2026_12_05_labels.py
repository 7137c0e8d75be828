"""Labels that regions count in the probe of a task."""

import sqlalchemy as sa
from alembic import op

revision = "2026_12_05_labels"
down_revision = "2026_12_04_lists"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add their numbers by region; {}: none are known."""
    op.add_column("weights", sa.Column("labels_json", sa.Text, nullable=False, server_default="{}"))
