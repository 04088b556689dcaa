"""Bugs seeded on purpose: a harness that does not find them proves nothing."""

import importlib.util
import re
from pathlib import Path

import pytest

from polymorph.bus.errors import Conflict
from polymorph.compiler.adapters.promotion_commit import Commit
from polymorph.compiler.adapters.promotion_keys import PromotionKeys
from polymorph.events.state import DesiredState
from polymorph.ledger import messages
from polymorph.ledger.ledger import Ledger
from polymorph.ledger.relay import OutboxRelay
from polymorph.ledger.tables import StepStatus

SEEDS = range(60)


def load_seeds():
    path = Path(__file__).with_name("test_promotion_seeds.py")
    spec = importlib.util.spec_from_file_location("promotion_seeds", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blind_write(patch):
    """The compare-and-set became a plain put."""

    async def commit(self, desired, kv_revision):
        signed = self._signed(desired).model_dump_json().encode()
        await self._bus.kv_put("desired", desired.pool, signed)

    patch.setattr(PromotionKeys, "commit", commit)


def report_first(patch):
    """The record is confirmed, and the event queued, before key-value shows anything."""

    async def carry_out(self, step):
        await self._ledger.settle(step.pool, step.generation)
        step.status = StepStatus.INTENT
        shown = await self._keys.shown(step.pool)
        try:
            await self._keys.commit(DesiredState.model_validate(step.target), shown.kv_revision)
        except Conflict:
            return StepStatus.SUPERSEDED
        return StepStatus.CONFIRMED

    patch.setattr(Commit, "carry_out", carry_out)


def mark_first(patch):
    """The relay marks a row as published and publishes it then."""

    async def drain(self):
        for row in await self._database.read(lambda session: messages.pending(session, 64)):
            await self._mark(row.sequence)
            await self._bus.publish(messages.decode(row.type, row.data))
        return 0

    patch.setattr(OutboxRelay, "drain", drain)


def plan_on_anything(patch):
    """A step is committed onto whatever is shown, not onto the generation that it was planned on."""
    honest = Commit._standing

    async def standing(self, step, shown):
        if shown is not None and step.base_generation < shown.generation < step.generation:
            return StepStatus.INTENT
        return await honest(self, step, shown)

    patch.setattr(Commit, "_standing", standing)


def never_settle(patch):
    """What a crash left between commit and confirmation stays there."""
    honest = Ledger.settle

    async def settle(self, pool, shown):
        step = await self.step(pool, shown)
        fresh = step is not None and step.status == StepStatus.INTENT and step.generation % 2 == 0
        return [] if fresh else await honest(self, pool, shown)

    patch.setattr(Ledger, "settle", settle)


@pytest.mark.parametrize(
    ("bug", "symptom"),
    [
        (blind_write, "generation|won over|shown"),
        (report_first, "reported but not shown|was not shown|won over"),
        (mark_first, "was shown but not reported"),
        (plan_on_anything, "both won over"),
        (never_settle, "was shown but not reported|is intent in the record"),
    ],
)
def test_the_checker_finds_a_seeded_bug(rig, binding, monkeypatch, bug, symptom):
    bug(monkeypatch)
    seeds = load_seeds()
    for seed in SEEDS:
        found, _ = seeds.play(seed, rig, binding)
        if found:
            assert any(re.search(symptom, sentence) for sentence in found), found
            return
    pytest.fail(f"{len(SEEDS)} seeds did not find it")
