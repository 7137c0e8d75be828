"""How far commands had come when the control plane began, so that a store that was put back from a copy is known."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_26_shared"
down_revision = "2026_11_25_pace"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Let a region hold the last command that its agent can know of."""
    op.add_column("regions", sa.Column("shared_seq", sa.BigInteger, nullable=True))
