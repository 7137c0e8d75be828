"""Roles of users, and tokens that expire."""

import sqlalchemy as sa
from alembic import op

revision = "2026_12_01_roles"
down_revision = "2026_11_30_audit"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Every user stays what it was: a member, whose token does not expire."""
    op.add_column("users", sa.Column("role", sa.String(16), nullable=False, server_default="member"))
    op.add_column("users", sa.Column("token_expires_at", sa.Double, nullable=False, server_default="0"))
