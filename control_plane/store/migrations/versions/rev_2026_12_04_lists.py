"""Lists of jobs, and look-ups by task, in a time that does not grow with the number of ended jobs."""

import sqlalchemy as sa
from alembic import op

revision = "2026_12_04_lists"
down_revision = "2026_12_03_starts"
branch_labels = None
depends_on = None
_SHARED = "shared_with != '[]'"


def upgrade() -> None:
    """Let a job say whether it has secure aggregation, and index jobs by what lists choose."""
    op.add_column("jobs", sa.Column("secure_aggregation", sa.Boolean, nullable=False, server_default=sa.false()))
    jobs = sa.table("jobs", sa.column("spec_json", sa.Text), sa.column("secure_aggregation", sa.Boolean))
    secure = jobs.c.spec_json.contains('"secureAggregation":true')
    op.execute(sa.update(jobs).where(secure).values(secure_aggregation=True))
    op.drop_index("ix_jobs_phase", "jobs")
    op.drop_index("ix_jobs_created_at", "jobs")
    summed = ["created_at", "user", "unpromised_worker_seconds"]
    op.create_index("ix_jobs_created_at_user_unpromised_worker_seconds", "jobs", summed)
    op.create_index("ix_jobs_phase_created_at", "jobs", ["phase", "created_at"])
    op.create_index("ix_jobs_user_created_at", "jobs", ["user", "created_at"])
    together = ["secure_aggregation", "task_key", "created_at"]
    op.create_index("ix_jobs_secure_aggregation_task_key_created_at", "jobs", together)
    only = sa.text(_SHARED)
    op.create_index("ix_jobs_shared", "jobs", ["created_at"], sqlite_where=only, postgresql_where=only)
