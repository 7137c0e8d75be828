"""The region's own audit log."""

from alembic import op

revision = "2026_12_03_audit"
down_revision = "2026_11_27_first"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Begin the log."""
    connection = op.get_bind()
    connection.exec_driver_sql(
        "create table audit (seq integer primary key, kind text not null, job text not null, epoch integer not null,"
        " mark text not null, text text not null, hash text not null)"
    )
    connection.exec_driver_sql("create index audit_job on audit (job, kind)")
