"""The audit log."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_30_audit"
down_revision = "2026_11_30_batch_norms"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create it; it begins now."""
    op.create_table(
        "audit",
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
    )
