"""Revoked certificates, keys of users, signatures of jobs, and with whom jobs are shared."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_28_trust"
down_revision = "2026_11_28_leadership"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; jobs of before are unsigned and shared with nobody."""
    op.create_table(
        "revocations",
        sa.Column("serial", sa.String(64), nullable=False),
        sa.Column("region", sa.String(64), nullable=False),
        sa.Column("expires", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("serial", name="pk_revocations"),
    )
    op.add_column("users", sa.Column("public_key", sa.Text, nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("signature_json", sa.Text, nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("shared_with", sa.Text, nullable=False, server_default="[]"))
