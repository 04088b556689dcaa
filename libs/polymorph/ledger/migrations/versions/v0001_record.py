"""The first record: searches, promotions, tenants, outbox and inbox."""

import sqlalchemy as sa
from alembic import op

from polymorph.ledger.columns import DOCUMENT, UtcDateTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _inbox()
    _outbox()
    _pools()
    _searches()
    _tenants()
    _candidates()
    _promotion_steps()
    _promotions()
    _revisions()
    _evaluations()


def downgrade() -> None:
    op.drop_table("evaluations")
    op.drop_table("revisions")
    op.drop_table("promotions")
    op.drop_table("promotion_steps")
    op.drop_table("candidates")
    op.drop_table("tenants")
    op.drop_table("searches")
    op.drop_table("pools")
    op.drop_table("outbox")
    op.drop_table("inbox")


def _inbox() -> None:
    op.create_table(
        "inbox",
        sa.Column("consumer", sa.String(), nullable=False),
        sa.Column("message_id", sa.String(), nullable=False),
        sa.Column("received_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("consumer", "message_id"),
    )


def _outbox() -> None:
    op.create_table(
        "outbox",
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("message_id", sa.String(), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("data", DOCUMENT, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("published_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("sequence"),
        sa.UniqueConstraint("message_id"),
    )
    op.create_index("ix_outbox_published_at", "outbox", ["published_at"], unique=False)


def _pools() -> None:
    op.create_table(
        "pools",
        sa.Column("pool", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("pool"),
    )


def _searches() -> None:
    op.create_table(
        "searches",
        sa.Column("search_id", sa.String(), nullable=False),
        sa.Column("pool", sa.String(), nullable=False),
        sa.Column("drift_id", sa.String(), nullable=True),
        sa.Column("definition", sa.String(), nullable=False),
        sa.Column("min_m", sa.Integer(), nullable=False),
        sa.Column("max_m", sa.Integer(), nullable=False),
        sa.Column("share", sa.Float(), nullable=False),
        sa.Column("budget_candidates", sa.Integer(), nullable=False),
        sa.Column("hardware", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("winner", sa.String(), nullable=True),
        sa.Column("candidates", sa.Integer(), nullable=False),
        sa.Column("cpu_s", sa.Float(), nullable=False),
        sa.Column("closing_reason", sa.String(), nullable=True),
        sa.Column("opened_at", UtcDateTime, nullable=False),
        sa.Column("closed_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("search_id"),
    )
    op.create_index("ix_searches_outcome", "searches", ["outcome"], unique=False)
    op.create_index("ix_searches_pool", "searches", ["pool"], unique=False)


def _tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("key_digest", sa.String(), nullable=False),
        sa.Column("disabled", sa.Boolean(), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id"),
        sa.UniqueConstraint("key_digest"),
    )


def _candidates() -> None:
    op.create_table(
        "candidates",
        sa.Column("candidate_id", sa.String(), nullable=False),
        sa.Column("search_id", sa.String(), nullable=False),
        sa.Column("pool", sa.String(), nullable=False),
        sa.Column("definition", sa.String(), nullable=False),
        sa.Column("solution", sa.String(), nullable=False),
        sa.Column("parent", sa.String(), nullable=True),
        sa.Column("proposer", sa.String(), nullable=False),
        sa.Column("pattern", sa.String(), nullable=False),
        sa.Column("params", DOCUMENT, nullable=False),
        sa.Column("proposed_at", UtcDateTime, nullable=False),
        sa.ForeignKeyConstraint(
            ["search_id"],
            ["searches.search_id"],
        ),
        sa.PrimaryKeyConstraint("candidate_id"),
    )
    op.create_index("ix_candidates_search_id", "candidates", ["search_id"], unique=False)


def _promotion_steps() -> None:
    op.create_table(
        "promotion_steps",
        sa.Column("pool", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("base_generation", sa.Integer(), nullable=False),
        sa.Column("promotion_id", sa.String(), nullable=True),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("target", DOCUMENT, nullable=False),
        sa.Column("messages", DOCUMENT, nullable=False),
        sa.Column("phases", DOCUMENT, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("settled_at", UtcDateTime, nullable=True),
        sa.ForeignKeyConstraint(
            ["pool"],
            ["pools.pool"],
        ),
        sa.PrimaryKeyConstraint("pool", "generation"),
    )
    op.create_index("ix_promotion_steps_status", "promotion_steps", ["status"], unique=False)


def _promotions() -> None:
    op.create_table(
        "promotions",
        sa.Column("promotion_id", sa.String(), nullable=False),
        sa.Column("pool", sa.String(), nullable=False),
        sa.Column("revision", sa.String(), nullable=False),
        sa.Column("phase", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("drift_id", sa.String(), nullable=True),
        sa.Column("proposal", DOCUMENT, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("updated_at", UtcDateTime, nullable=False),
        sa.ForeignKeyConstraint(
            ["pool"],
            ["pools.pool"],
        ),
        sa.PrimaryKeyConstraint("promotion_id"),
    )
    op.create_index("ix_promotions_phase", "promotions", ["phase"], unique=False)
    op.create_index("ix_promotions_pool", "promotions", ["pool"], unique=False)


def _revisions() -> None:
    op.create_table(
        "revisions",
        sa.Column("pool", sa.String(), nullable=False),
        sa.Column("revision", sa.String(), nullable=False),
        sa.Column("parent", sa.String(), nullable=True),
        sa.Column("content", DOCUMENT, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.ForeignKeyConstraint(
            ["pool"],
            ["pools.pool"],
        ),
        sa.PrimaryKeyConstraint("pool", "revision"),
    )


def _evaluations() -> None:
    op.create_table(
        "evaluations",
        sa.Column("evaluation_id", sa.String(), nullable=False),
        sa.Column("candidate_id", sa.String(), nullable=False),
        sa.Column("search_id", sa.String(), nullable=False),
        sa.Column("until", sa.String(), nullable=True),
        sa.Column("gate", sa.String(), nullable=True),
        sa.Column("verdict", sa.String(), nullable=True),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("speedup", DOCUMENT, nullable=True),
        sa.Column("result", DOCUMENT, nullable=True),
        sa.Column("cpu_s", sa.Float(), nullable=False),
        sa.Column("ordered_at", UtcDateTime, nullable=True),
        sa.Column("evaluated_at", UtcDateTime, nullable=True),
        sa.ForeignKeyConstraint(
            ["candidate_id"],
            ["candidates.candidate_id"],
        ),
        sa.ForeignKeyConstraint(
            ["search_id"],
            ["searches.search_id"],
        ),
        sa.PrimaryKeyConstraint("evaluation_id"),
    )
    op.create_index("ix_evaluations_candidate_id", "evaluations", ["candidate_id"], unique=False)
    op.create_index("ix_evaluations_search_id", "evaluations", ["search_id"], unique=False)
    op.create_index("ix_evaluations_verdict", "evaluations", ["verdict"], unique=False)
