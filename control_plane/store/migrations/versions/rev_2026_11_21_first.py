"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_21_first"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create all tables."""
    _create_jobs()
    _create_regions()
    _create_histories()
    op.create_table(
        "meta",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )


def _cursor() -> sa.Column[int]:
    kind = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    return sa.Column("cursor", kind, primary_key=True, autoincrement=True)


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(256), nullable=False),
        sa.Column("content_digest", sa.String(80), nullable=False),
        sa.Column("bundle_digest", sa.String(80), nullable=False),
        sa.Column("task_key", sa.String(80), nullable=False),
        sa.Column("spec_json", sa.Text, nullable=False),
        sa.Column("plan_json", sa.Text, nullable=False),
        sa.Column("state_json", sa.Text, nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("result_json", sa.Text, nullable=False),
        sa.UniqueConstraint("request_id"),
    )
    for column in ("name", "phase", "created_at"):
        op.create_index(f"ix_jobs_{column}", "jobs", [column])


def _create_regions() -> None:
    op.create_table(
        "regions",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("cloud", sa.String(64), nullable=False),
        sa.Column("agent_version", sa.String(64), nullable=False),
        sa.Column("catalogue_json", sa.Text, nullable=False),
        sa.Column("state_json", sa.Text, nullable=False),
        sa.Column("serials", sa.Text, nullable=False),
        sa.Column("certificate_expires", sa.Double, nullable=False),
        sa.Column("command_seq", sa.BigInteger, nullable=False),
        sa.Column("command_cursor", sa.BigInteger, nullable=False),
        sa.Column("report_cursor", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "commands",
        sa.Column("region", sa.String(64), sa.ForeignKey("regions.name"), primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "invitations",
        sa.Column("secret_hash", sa.String(80), primary_key=True),
        sa.Column("region", sa.String(64), nullable=False),
        sa.Column("expires", sa.Double, nullable=False),
        sa.Column("used_at", sa.Double, nullable=False),
    )
    op.create_index("ix_invitations_region", "invitations", ["region"])


def _create_histories() -> None:
    op.create_table(
        "events",
        _cursor(),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("region", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("data_json", sa.Text, nullable=False),
        sa.Column("terminal", sa.Boolean, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_job_cursor", "events", ["job", "cursor"])
    op.create_table(
        "logs",
        _cursor(),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("region", sa.String(64), nullable=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_logs_job_cursor", "logs", ["job", "cursor"])
    op.create_table(
        "runs",
        sa.Column("job", sa.String(64), primary_key=True),
        sa.Column("region", sa.String(64), primary_key=True),
        sa.Column("task_key", sa.String(80), nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("samples_per_second", sa.Double, nullable=False),
        sa.Column("model_bytes", sa.BigInteger, nullable=False),
        sa.Column("start_seconds", sa.Double, nullable=False),
    )
    op.create_index("ix_runs_task_key", "runs", ["task_key"])
