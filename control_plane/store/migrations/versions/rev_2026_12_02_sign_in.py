"""Users who sign in by an identity provider."""

import sqlalchemy as sa
from alembic import op

revision = "2026_12_02_sign_in"
down_revision = "2026_12_01_roles"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """No user has an identity yet."""
    op.add_column("users", sa.Column("identity", sa.String(320), nullable=False, server_default=""))
    op.add_column("users", sa.Column("subject", sa.String(80), nullable=False, server_default=""))
    op.add_column("users", sa.Column("sign_ins_json", sa.Text, nullable=False, server_default=""))
