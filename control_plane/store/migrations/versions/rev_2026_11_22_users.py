"""Who submits jobs."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_22_users"
down_revision = "2026_11_21_profiles"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Know users, and whose each job is: those of before are the operator's."""
    op.create_table(
        "users",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("token_hash", sa.String(80), nullable=False),
        sa.Column("promised_workers", sa.Integer),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_users"),
        sa.UniqueConstraint("token_hash", name="uq_users_token_hash"),
    )
    op.add_column("jobs", sa.Column("user", sa.String(64), nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("unpromised_worker_seconds", sa.Double, nullable=False, server_default="0"))
