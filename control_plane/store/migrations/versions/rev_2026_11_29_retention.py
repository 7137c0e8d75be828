"""What retention needs to know of jobs, and which jobs were deleted."""

import json

import sqlalchemy as sa
from alembic import op

revision = "2026_11_29_retention"
down_revision = "2026_11_28_trust"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them, for present jobs from their states."""
    op.create_table(
        "deletions",
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("user", sa.String(64), nullable=False),
        sa.Column("by", sa.String(64), nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("unpromised_worker_seconds", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("job", name="pk_deletions"),
    )
    op.add_column("jobs", sa.Column("ended_at", sa.Double, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("model_digests", sa.Text, nullable=False, server_default="[]"))
    jobs = sa.table(
        "jobs",
        sa.column("id", sa.String),
        sa.column("state_json", sa.Text),
        sa.column("ended_at", sa.Double),
        sa.column("model_digests", sa.Text),
    )
    connection = op.get_bind()
    for job, text in connection.execute(sa.select(jobs.c.id, jobs.c.state_json)).all():
        state = json.loads(text)
        kept = [model["digest"] for model in state.get("models", {}).get("kept", ())]
        digests = sorted({*kept, state.get("blob_digest", "")} - {""})
        values = {"ended_at": state.get("finished_at", 0.0), "model_digests": json.dumps(digests)}
        connection.execute(jobs.update().where(jobs.c.id == job).values(**values))
