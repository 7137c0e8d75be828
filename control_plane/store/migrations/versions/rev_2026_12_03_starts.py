"""What runs tell of their start, of the ends of rounds, and of what they have sent."""

import sqlalchemy as sa
from alembic import op

revision = "2026_12_03_starts"
down_revision = "2026_12_02_sign_in"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Let a run hold the seconds of its function, of its parameter server and of its rounds, and what it sent."""
    op.add_column("runs", sa.Column("start_function_seconds", sa.Double, nullable=True))
    op.add_column("runs", sa.Column("start_server_seconds", sa.Double, nullable=True))
    op.add_column("runs", sa.Column("round_end_seconds", sa.Double, nullable=True))
    op.add_column("runs", sa.Column("round_work_seconds", sa.Double, nullable=True))
    op.add_column("runs", sa.Column("sent_share", sa.Double, nullable=True))
