"""Look-ups of the jobs that need a file, so that a sweep does not read all jobs."""

import sqlalchemy as sa
from alembic import op

revision = "2026_12_09_blobs"
down_revision = "2026_12_08_sweeps"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """List the models of ended jobs, and index jobs by their code together with their end."""
    op.create_table(
        "job_models",
        sa.Column("digest", sa.String(80), nullable=False),
        sa.Column("job", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("digest", "job", name="pk_job_models"),
    )
    op.create_index("ix_job_models_job", "job_models", ["job"])
    of_postgres = op.get_bind().dialect.name == "postgresql"
    each = "json_array_elements_text(CAST(model_digests AS json))" if of_postgres else "json_each(model_digests)"
    found = f"SELECT DISTINCT each.value, jobs.id FROM jobs, {each} AS each WHERE jobs.ended_at > 0"
    op.execute(f"INSERT INTO job_models (digest, job) {found}")
    op.drop_index("ix_jobs_bundle_digest", "jobs")
    op.create_index("ix_jobs_bundle_digest_ended_at", "jobs", ["bundle_digest", "ended_at"])
