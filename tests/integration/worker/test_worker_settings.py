"""Settings reach a worker that serves, between two steps: read back from inside, or refused."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polymorph.bus.nats import NatsBus
from polymorph.events.requests import PlanAnswer, PlanChange
from polymorph.events.values import EngineSettings, Revision

sys.path.insert(0, str(Path(__file__).parent))
from streams import Load, stream

pytestmark = [pytest.mark.engine, pytest.mark.real]
TOKENS = 240


async def _planned(bus: NatsBus, **settings: Any) -> PlanAnswer:
    revision = Revision(revision="asked", engine=EngineSettings(**settings))
    request = PlanChange(worker_id="w1", revision=revision)
    return PlanAnswer.model_validate_json(await bus.request(request, timeout_s=20))


async def test_settings_within_the_envelope_change_under_traffic(house: Any, bus: NatsBus) -> None:
    wanted = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "long_prefill_token_threshold": 32,
        "scheduling_policy": "priority",
        "scheduler_reserve_full_isl": False,
    }
    plan = await _planned(bus, **wanted)
    assert (plan.ok, plan.way, plan.pause, plan.cache_reset) == (True, "live", False, False)
    assert plan.inverse is not None
    assert plan.inverse.max_num_seqs == 8
    load = Load(house.url, 4, TOKENS)
    desired = await house.desire_settings(bus, **wanted)
    event = await house.answer(bus, desired.generation)
    assert event["type"] == "loaded", event
    assert event["way"] == "live"
    assert event["stood_s"] < 0.1
    assert {name: event["settings"][name] for name in wanted} == wanted
    async with asyncio.timeout(20):
        while (record := await house.record(bus)).revision != desired.stable.revision:
            await asyncio.sleep(0.1)
        while (await house.record(bus)).running > 2:
            await asyncio.sleep(0.1)
    assert record.settings.max_num_batched_tokens == 64
    assert record.max_num_seqs == 2
    desired = await house.desire_revision(bus, Revision(revision="back", engine=plan.inverse))
    event = await house.answer(bus, desired.generation)
    assert event["settings"]["max_num_seqs"] == 8
    assert event["settings"]["scheduling_policy"] == "fcfs"
    await load.end()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_seqs": 4}, "supported are max_num_seqs"),
        ({"max_num_batched_tokens": 4}, "a token for each of the 8 sequences"),
        ({"speculative_method": "medusa"}, "use none, ngram, draft_model"),
    ],
)
async def test_what_cannot_be_is_refused_in_words(
    house: Any, bus: NatsBus, settings: dict[str, Any], reason: str
) -> None:
    before = (await house.record(bus)).settings
    desired = await house.desire_settings(bus, **settings)
    event = await house.answer(bus, desired.generation)
    assert event["type"] == "refused", event
    assert reason in event["reason"]
    assert (await house.record(bus)).settings == before
    assert (await stream(house.url, 1, TOKENS)).whole(TOKENS)


async def test_the_command_says_what_a_worker_would_do(house: Any, bus: NatsBus, tmp_path: Path) -> None:
    asked = tmp_path / "asked.yaml"
    asked.write_text("block_size: 64\nmax_num_seqs: 4\n")
    nats = house.nats.settings("operator")
    command = [sys.executable, "-m", "polymorph.embedded.cli", "plan", str(asked), "--pool", "tiny"]
    command += ["--nats", nats.url, "--user", nats.user]
    environment = {**os.environ, "POLYMORPH_NATS_PASSWORD": nats.password.get_secret_value()}
    ran = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("w1: engine: block_size null -> 64: a new engine; a second engine needs ")
    assert lines[1:3] == ["  max_num_seqs: 8 -> 4", "  block_size: null -> 64"]
