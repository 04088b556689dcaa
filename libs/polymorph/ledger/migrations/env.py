"""Run by Alembic: migrates on the connection that `upgrade` hands over."""

from alembic import context
from sqlmodel import SQLModel

import polymorph.ledger.memory
import polymorph.ledger.tables  # noqa: F401 - fills the metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=SQLModel.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
