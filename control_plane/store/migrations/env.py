"""Alembic's entry: runs the migrations on the connection that `open_store` hands over."""

from alembic import context

from control_plane.store._schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
