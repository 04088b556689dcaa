"""An engine killed, and one that a kernel crashes, in a fleet that streams: clients see what they see without a fault."""

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from polymorph.bus import topology
from polymorph.bus.nats import NatsBus
from polymorph.compiler.domain.promotion.policy import Policy
from polymorph.config.clock import SystemClock
from polymorph.engine.loading.target import standing
from polymorph.events.base import Message
from polymorph.events.state import Quarantine
from polymorph.events.types import RequestStarted
from polymorph.events.values import KernelBinding, Ratio

sys.path.insert(0, str(Path(__file__).parent))
from fleet import MODEL, POOL, SEQUENCES, WORKERS, Fleet, Journey, fleet
from listening import events, told
from making import ROOT, built, signed

pytestmark = [
    pytest.mark.engine,
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

FAULTY = Path(__file__).parent / "faulty_gemm.cpp"
FAULT_AT = 600
"""Four layers call it in each step: it serves its read-back and more than a hundred steps of the streams first."""
TOKENS = 240
STREAMS = 2 * (SEQUENCES + 2)
"""Each worker computes four of its six: two of them have no byte while those run."""
FASTER = Ratio(point=1.2, low=1.1, high=1.3)
DIRECT, HALF = Policy("direct"), Policy("half", shares=(0.5,))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory, start: Any) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path_factory.mktemp("fleet"), start) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def good(running: Fleet) -> KernelBinding:
    """Promoted by the record's own rules; both workers run it."""
    kernel = await signed(running.bus, built(running.folder), _definition(), running.evaluator)
    result = await running.promoting(DIRECT).promote(
        POOL, bindings=(kernel,), reason="it is good", speedup=FASTER
    )
    assert result.promoted, result
    for worker in WORKERS:
        await running.until(worker, revision=(await running.desired()).stable.revision)
    return kernel


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(running: Fleet, good: KernelBinding) -> list[Journey]:
    """What clients get while nothing happens."""
    del good
    journeys = [Journey(f"calm-{number}", _prompt(number), TOKENS) for number in range(STREAMS)]
    await _travel(running, journeys)
    return journeys


def _definition() -> str:
    config = json.loads((ROOT / "models" / MODEL / "config.json").read_text())
    return f"gemm_n{2 * config['intermediate_size']}_k{config['hidden_size']}_f32"


def _prompt(number: int) -> str:
    return f"story number {number} begins"


async def _travel(running: Fleet, journeys: list[Journey]) -> None:
    async with httpx.AsyncClient(base_url=running.url, timeout=300) as client:
        await asyncio.gather(*(journey.go(client) for journey in journeys))


class Sent:
    """Where the gateway sent each request, in order."""

    def __init__(self) -> None:
        self.workers: dict[str, list[str]] = defaultdict(list)

    async def hear(self, subject: str, message: Message) -> None:
        del subject
        if isinstance(message, RequestStarted):
            self.workers[message.request_id].append(message.worker_id)


@pytest_asyncio.fixture(loop_scope="module")
async def sent(running: Fleet) -> AsyncIterator[Sent]:
    bus = await NatsBus.connect(running.nats.settings("router"), "/polymorph/router/test", SystemClock())
    heard = Sent()
    end = await bus.listen(RequestStarted.wildcard(), heard.hear)
    yield heard
    await end()
    await bus.close()


def _check(running: Fleet, journeys: list[Journey], expected: list[Journey]) -> None:
    """Whole, with the same text, and each token once."""
    for journey, calm in zip(journeys, expected, strict=True):
        assert journey.whole, (journey.name, journey.status, journey.lines[-2:], running.logs())
        assert journey.tokens == calm.tokens, journey.name
        assert journey.text == calm.text, journey.name
        assert len(journey.tokens) == TOKENS
        assert journey.usage["completion_tokens"] == TOKENS


def _check_sent(sent: Sent, journeys: list[Journey]) -> None:
    """Whoever had a byte stayed where it was; some had none, and the other worker answered them."""
    ways = [tuple(sent.workers[journey.name]) for journey in journeys]
    assert ("w1", "w2") in ways, ways
    assert set(ways) <= {("w1",), ("w2",), ("w1", "w2")}, ways
    assert ("w1",) in ways, ways


async def _begun(journeys: list[Journey], sent: Sent) -> None:
    """Some streams of the first worker run and some wait for them."""
    async with asyncio.timeout(120):
        while True:
            here = [each for each in journeys if sent.workers[each.name][-1:] == ["w1"]]
            if sum(len(each.tokens) > 10 for each in here) == SEQUENCES and len(here) > SEQUENCES:
                return
            await asyncio.sleep(0.02)


async def test_an_engine_is_killed_in_the_middle_of_streams(
    running: Fleet, expected: list[Journey], sent: Sent
) -> None:
    assert all(journey.whole for journey in expected), running.logs()
    journeys = [Journey(f"killed-{number}", _prompt(number), TOKENS) for number in range(STREAMS)]
    travelling = asyncio.create_task(_travel(running, journeys))
    await _begun(journeys, sent)
    running.kill_engine("w1")
    assert (await running.until("w1", state="starting")).holds
    await travelling
    _check(running, journeys, expected)
    _check_sent(sent, journeys)
    stable = (await running.desired()).stable
    await running.until("w1", state="ready", revision=stable.revision, holds=False)
    assert await running.engaged("w1") == [stable.kernels[0].artifact]


async def test_a_kernel_crashes_an_engine_in_the_middle_of_streams(
    running: Fleet, good: KernelBinding, expected: list[Journey], sent: Sent
) -> None:
    library = built(running.folder, f"-DFAULT_AT={FAULT_AT}", source=FAULTY)
    bad = await signed(running.bus, library, _definition(), running.evaluator)
    promotion = next(
        name
        for name in map(str, range(1000))
        if standing("w1", name) < HALF.shares[0] <= standing("w2", name)
    )
    stable = (await running.desired()).stable
    async with events(running.bus) as heard:
        result = await running.promoting(HALF).promote(
            POOL, bindings=(bad,), reason="it seems good", speedup=FASTER, promotion_id=promotion
        )
        tried = await running.desired()
        assert tried.candidate is not None, result
        await running.until("w1", revision=tried.candidate.revision)
        journeys = [Journey(f"crashed-{number}", _prompt(number), TOKENS) for number in range(STREAMS)]
        await _travel(running, journeys)
        fault = await told(heard, "kernel-faulted", tried.generation)
    assert (fault["worker_id"], fault["artifact"], fault["how"]) == ("w1", bad.artifact, "crash")
    _check(running, journeys, expected)
    _check_sent(sent, journeys)
    await running.until("w1", state="ready", revision=stable.revision, holds=False)
    for worker in WORKERS:
        assert await running.engaged(worker) == [good.artifact]
    entry = await running.bus.kv_get(topology.QUARANTINE, bad.artifact)
    assert "crash in worker w1" in Quarantine.model_validate_json(entry.value or b"").reason
    left = await running.desired()
    assert (left.candidate, left.stable) == (None, stable)
    again = await running.promoting(DIRECT).promote(POOL, bindings=(bad,), reason="again", speedup=FASTER)
    assert not again.promoted
    assert "in quarantine" in again.reason
