"""Which control plane leads: one row, by whose epoch every writing transaction is fenced."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_28_leadership"
down_revision = "2026_11_27_reports"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table with its row: nobody leads."""
    table = op.create_table(
        "leadership",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("beats", sa.BigInteger, nullable=False),
        sa.Column("changes", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.String(256), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_leadership"),
    )
    op.bulk_insert(table, [{"id": 1, "epoch": 0, "beats": 0, "changes": 0, "holder": ""}])
