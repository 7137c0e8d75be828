"""How long steps of models in stages took, beside what was predicted."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_25_pace"
down_revision = "2026_11_22_weights"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Let a run hold its pace."""
    op.add_column("runs", sa.Column("stage_pace", sa.Double, nullable=False, server_default="0"))
