"""Tables of the store, as of the latest migration."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    false,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    }
)
SHARED = "shared_with != '[]'"
"""Condition of jobs that other users may read. A partial index is used only by queries with the same text."""
# SQLite generates keys only for columns of the exact type INTEGER.
_Cursor = BigInteger().with_variant(Integer, "sqlite")

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", String(64), nullable=False, index=True),
    Column("request_id", String(256), nullable=False, unique=True),
    Column("content_digest", String(80), nullable=False),
    Column("bundle_digest", String(80), nullable=False),
    Column("task_key", String(80), nullable=False),
    Column("spec_json", Text, nullable=False),
    Column("plan_json", Text, nullable=False),
    Column("state_json", Text, nullable=False),
    Column("phase", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("result_json", Text, nullable=False),
    Column("user", String(64), nullable=False, server_default=""),
    Column("unpromised_worker_seconds", Double, nullable=False, server_default="0"),
    Column("signature_json", Text, nullable=False, server_default=""),
    Column("shared_with", Text, nullable=False, server_default="[]"),
    Column("ended_at", Double, nullable=False, server_default="0"),
    Column("model_digests", Text, nullable=False, server_default="[]"),
    Column("secure_aggregation", Boolean, nullable=False, server_default=false()),
    # Each serves one list, sum or look-up, which must not read the rows of all ended jobs.
    Index(None, "created_at", "user", "unpromised_worker_seconds"),
    Index(None, "phase", "created_at"),
    Index(None, "user", "created_at"),
    Index(None, "secure_aggregation", "task_key", "created_at"),
    Index(None, "ended_at"),
    Index(None, "bundle_digest", "ended_at"),
    Index("ix_jobs_shared", "created_at", sqlite_where=text(SHARED), postgresql_where=text(SHARED)),
)
# Which ended jobs have a model, so that a file's jobs are found; those of the others are in memory.
job_models = Table(
    "job_models",
    metadata,
    Column("digest", String(80), primary_key=True),
    Column("job", String(64), primary_key=True, index=True),
)
deletions = Table(
    "deletions",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("user", String(64), nullable=False),
    Column("by", String(64), nullable=False),
    Column("at", Double, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("unpromised_worker_seconds", Double, nullable=False),
)
users = Table(
    "users",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("token_hash", String(80), nullable=False, unique=True),
    Column("promised_workers", Integer),
    Column("created_at", Double, nullable=False),
    Column("public_key", Text, nullable=False, server_default=""),
    Column("role", String(16), nullable=False, server_default="member"),
    Column("token_expires_at", Double, nullable=False, server_default="0"),
    Column("identity", String(320), nullable=False, server_default=""),
    Column("subject", String(80), nullable=False, server_default=""),
    Column("sign_ins_json", Text, nullable=False, server_default=""),
)
events = Table(
    "events",
    metadata,
    Column("cursor", _Cursor, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("job", String(64), nullable=False),
    Column("region", String(64), nullable=False),
    Column("kind", String(64), nullable=False),
    Column("text", Text, nullable=False),
    Column("data_json", Text, nullable=False),
    Column("terminal", Boolean, nullable=False),
    Index(None, "job", "cursor"),
    sqlite_autoincrement=True,
)
regions = Table(
    "regions",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("cloud", String(64), nullable=False),
    Column("agent_version", String(64), nullable=False),
    Column("catalogue_json", Text, nullable=False),
    Column("state_json", Text, nullable=False),
    Column("serials", Text, nullable=False),
    Column("certificate_expires", Double, nullable=False),
    Column("command_seq", BigInteger, nullable=False),
    Column("command_cursor", BigInteger, nullable=False),
    Column("report_cursor", BigInteger, nullable=False),
    Column("shared_seq", BigInteger, nullable=True),
)
revocations = Table(
    "revocations",
    metadata,
    Column("serial", String(64), primary_key=True),
    Column("region", String(64), nullable=False),
    Column("expires", Double, nullable=False),
)
commands = Table(
    "commands",
    metadata,
    Column("region", String(64), ForeignKey("regions.name"), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("job", String(64), nullable=False),
    Column("payload", LargeBinary, nullable=False),
)
invitations = Table(
    "invitations",
    metadata,
    Column("secret_hash", String(80), primary_key=True),
    Column("region", String(64), nullable=False, index=True),
    Column("expires", Double, nullable=False),
    Column("used_at", Double, nullable=False),
)
logs = Table(
    "logs",
    metadata,
    Column("cursor", _Cursor, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("job", String(64), nullable=False),
    Column("region", String(64), nullable=False),
    Column("source", String(64), nullable=False),
    Column("text", Text, nullable=False),
    Index(None, "job", "cursor"),
    sqlite_autoincrement=True,
)
runs = Table(
    "runs",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("region", String(64), primary_key=True),
    Column("task_key", String(80), nullable=False, index=True),
    Column("at", Double, nullable=False),
    Column("samples_per_second", Double, nullable=False),
    Column("model_bytes", BigInteger, nullable=False),
    Column("start_seconds", Double, nullable=False),
    Column("profile_json", Text, nullable=False, server_default=""),
    Column("merge_json", Text, nullable=False, server_default=""),
    Column("kin_key", String(80), nullable=False, server_default="", index=True),
    Column("batch", Integer, nullable=False, server_default="0"),
    Column("stage_pace", Double, nullable=False, server_default="0"),
    Column("start_function_seconds", Double, nullable=True),
    Column("start_server_seconds", Double, nullable=True),
    Column("round_end_seconds", Double, nullable=True),
    Column("round_work_seconds", Double, nullable=True),
    Column("background_end_seconds", Double, nullable=True),
    Column("rest_seconds", Double, nullable=True),
    Column("sent_share", Double, nullable=True),
)
weights = Table(
    "weights",
    metadata,
    Column("task_key", String(80), primary_key=True),
    Column("region", String(64), nullable=False),
    Column("at", Double, nullable=False),
    Column("parameters", BigInteger, nullable=False),
    Column("model_bytes", BigInteger, nullable=False),
    Column("steps_json", Text, nullable=False),
    Column("start_seconds", Double, nullable=False),
    Column("note", Text, nullable=False),
    Column("held_bytes", BigInteger, nullable=False, server_default="0"),
    Column("batch_norms_json", Text, nullable=False, server_default="[]"),
    Column("labels_json", Text, nullable=False, server_default="{}"),
    Column("gpu_lacks_json", Text, nullable=False, server_default="{}"),
)
audit = Table(
    "audit",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("text", Text, nullable=False),
    Column("hash", String(64), nullable=False),
)
meta = Table(
    "meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)
leadership = Table(
    "leadership",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),
    Column("beats", BigInteger, nullable=False),
    Column("changes", BigInteger, nullable=False),
    Column("holder", String(256), nullable=False),
)
