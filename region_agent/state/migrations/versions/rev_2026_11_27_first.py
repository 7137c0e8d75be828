"""The first revision, which also takes over databases of agents that had none."""

from alembic import op

revision = "2026_11_27_first"
down_revision = None
branch_labels = None
depends_on = None

_TABLES = """
create table if not exists facts (name text primary key, value text not null);
create table if not exists partitions (
    job text primary key, start blob not null, peers blob, attempt integer not null, publish integer not null,
    worker_port integer not null, exchange_port integer not null, token_key text not null, stopped integer not null);
create table if not exists sendings (job text primary key, message blob not null, sent integer not null default 0);
create table if not exists reports (seq integer primary key autoincrement, message blob not null);
create table if not exists set_aside (
    id integer primary key autoincrement, at real not null, kind text not null, seq integer not null,
    reason text not null, message blob not null);
create table if not exists meters (
    job text not null, name text not null, value real not null, primary key (job, name));
create table if not exists invocations (id integer primary key, job text not null, begun real not null);
"""
_COLUMNS = {
    "partitions": {
        "bulk_port": "integer not null default 0",
        "workers": "integer",
        "batch": "integer",
        "rate": "real",
        "stretches": "text",
        "preemptible": "integer",
        "scale_order": "integer",
    },
    "invocations": {"preemptible": "integer not null default 0"},
}


def upgrade() -> None:
    """Create the tables, or add the columns that the tables of an earlier agent lack."""
    connection = op.get_bind()
    for statement in _TABLES.split(";"):
        if statement.strip():
            connection.exec_driver_sql(statement)
    for table, columns in _COLUMNS.items():
        present = {row[1] for row in connection.exec_driver_sql(f"pragma table_info({table})")}
        for name, kind in columns.items():
            if name not in present:
                connection.exec_driver_sql(f"alter table {table} add column {name} {kind}")
