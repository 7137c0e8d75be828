"""What profiles and merges have taught."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_21_profiles"
down_revision = "2026_11_21_first"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Let a run hold what a profile has measured, and how long its merges took."""
    for name in ("profile_json", "merge_json"):
        op.add_column("runs", sa.Column(name, sa.Text, nullable=False, server_default=""))
