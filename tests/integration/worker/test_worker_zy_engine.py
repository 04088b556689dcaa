"""An engine is warmed beside the one that serves, and takes over. After the others: it is another engine from then on."""

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from polymorph.bus.nats import NatsBus
from polymorph.events.requests import PlanAnswer, PlanChange
from polymorph.events.values import EngineSettings, Revision

sys.path.insert(0, str(Path(__file__).parent))
from streams import Load, stream

pytestmark = [pytest.mark.engine, pytest.mark.real]
TOKENS = 100
DRAFT = Path(__file__).parents[3] / "models" / "tiny-draft"
WANTED = {
    "block_size": 64,
    "max_num_seqs": 96,
    "speculative_method": "draft_model",
    "speculative_model": str(DRAFT),
    "num_speculative_tokens": 2,
}


async def _text(url: str) -> str:
    body = {"model": "tiny-dense", "prompt": "def main():", "max_tokens": 40, "temperature": 0}
    async with httpx.AsyncClient(timeout=200) as client:
        answer = await client.post(f"{url}/v1/completions", json=body)
    text: str = answer.json()["choices"][0]["text"]
    return text


async def _generated(url: str) -> tuple[float, bool]:
    """Tokens that vLLM's own metric counts, and whether the block size that it tells is the new one."""
    async with httpx.AsyncClient(timeout=30) as client:
        text = (await client.get(f"{url}/metrics")).text
    counts = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    return float(counts[0].split()[-1]), 'block_size="64"' in text


async def test_an_engine_is_replaced_under_traffic(house: Any, bus: NatsBus) -> None:
    revision = Revision(revision="asked", engine=EngineSettings(**WANTED))
    request = PlanChange(worker_id="w1", revision=revision)
    plan = PlanAnswer.model_validate_json(await bus.request(request, timeout_s=20))
    assert (plan.way, plan.cache_reset) == ("engine", True)
    assert "above the envelope of 64" in plan.why
    await _text(house.url)
    counted, new = await _generated(house.url)
    assert counted > 0
    assert not new
    load = Load(house.url, 3, TOKENS)
    desired = await house.desire_settings(bus, **WANTED)
    event = await house.answer(bus, desired.generation, 280)
    assert event["type"] == "loaded", event
    assert event["way"] == "engine"
    assert {name: event["settings"][name] for name in WANTED} == WANTED
    await load.end()
    assert (await stream(house.url, 9, TOKENS)).revision == desired.stable.revision
    async with asyncio.timeout(20):
        while (record := await house.record(bus)).revision != desired.stable.revision:
            await asyncio.sleep(0.1)
    assert record.settings.block_size == 64
    tokens, new = await _generated(house.url)
    assert tokens > counted + TOKENS
    assert new
    assert "the engine that was replaced has ended" in house.log


async def test_a_draft_model_gets_other_weights_while_it_serves(
    house: Any, bus: NatsBus, tmp_path: Path
) -> None:
    """Follows the test above: its engine has a draft model."""
    other = tmp_path / "draft"
    shutil.copytree(DRAFT, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: weight * 0.5 for name, weight in weights.items()}, other / "model.safetensors")
    before = await _text(house.url)
    traffic = asyncio.create_task(stream(house.url, 1, TOKENS))
    desired = await house.desire_settings(bus, **{**WANTED, "speculative_model": str(other)})
    event = await house.answer(bus, desired.generation)
    assert event["type"] == "loaded", event
    assert event["way"] == "live"
    assert 0 < event["stood_s"] < 5
    assert event["settings"]["speculative_model"] == str(other)
    assert (await traffic).whole(TOKENS)
    assert await _text(house.url) == before
    wrong = await house.desire_settings(
        bus, **{**WANTED, "speculative_model": str(DRAFT.parent / "tiny-dense")}
    )
    event = await house.answer(bus, wrong.generation)
    assert event["type"] == "refused", event
    assert "num_hidden_layers 4, the draft model that runs has 1" in event["reason"]
    assert await _text(house.url) == before
