"""Sweeps of what is kept, and deletions, in a time that does not grow with the number of ended jobs."""

from alembic import op

revision = "2026_12_08_sweeps"
down_revision = "2026_12_07_standing"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Index jobs by their end and by their code."""
    op.create_index("ix_jobs_ended_at", "jobs", ["ended_at"])
    op.create_index("ix_jobs_bundle_digest", "jobs", ["bundle_digest"])
