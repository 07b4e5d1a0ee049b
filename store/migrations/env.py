"""Run by Alembic: migrate within the transaction of the connection that `upgrade` was given."""

from alembic import context

from kvtune.store.migrations import migration_options

context.configure(connection=context.config.attributes["connection"], **migration_options())
with context.begin_transaction():
    context.run_migrations()
