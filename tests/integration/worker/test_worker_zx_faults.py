"""A kernel that crashes, and one that hangs, in a worker that serves: nobody but the kernel pays for it."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from polymorph.bus import topology
from polymorph.bus.nats import NatsBus
from polymorph.events.state import Quarantine
from polymorph.events.values import KernelBinding

sys.path.insert(0, str(Path(__file__).parent))
from listening import events, told
from streams import ask

pytestmark = [pytest.mark.engine, pytest.mark.real]

SOURCE = Path(__file__).parent / "faulty_gemm.cpp"
FAULT_AT = 300
"""Four layers call it in each step: it serves its read-back and some 60 steps of the streams first."""
TOKENS = 120


def requests() -> dict[str, dict[str, Any]]:
    """By name; all run at the same time. The first six can go on after a death, the others cannot."""
    base = {"model": "tiny-dense", "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    streamed = {**base, "stream": True, "stream_options": {"include_usage": True}}
    seeded = {"temperature": 0.9, "top_p": 0.95}
    grammar = {"structured_outputs": {"regex": "[a-z ]{400}"}}
    return {
        "greedy": {**streamed, "prompt": "def main():", "temperature": 0},
        "greedy, probabilities": {**streamed, "prompt": "The weather", "temperature": 0, "logprobs": 2},
        "greedy, at once": {**base, "prompt": "import os", "temperature": 0, "logprobs": 1},
        "seeded": {**streamed, "prompt": "Once upon a time", "seed": 7, **seeded},
        "seeded, two": {**streamed, "prompt": "class Engine:", "seed": 11, "n": 2, **seeded},
        "seeded, at once": {**base, "prompt": "It is said", "seed": 13, **seeded},
        "penalty": {**streamed, "prompt": "a b c", "temperature": 0, "presence_penalty": 0.5},
        "grammar": {**streamed, "prompt": "words:", "temperature": 0, **grammar},
    }


CAN_GO_ON = [name for name in requests() if name not in {"penalty", "grammar"}]


async def ask_all(url: str) -> dict[str, dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=180) as client:
        asked = requests()
        answers = await asyncio.gather(*(ask(client, body) for body in asked.values()))
    return dict(zip(asked, answers, strict=True))


async def counted(url: str, series: str) -> float:
    async with httpx.AsyncClient(timeout=30) as client:
        text = (await client.get(f"{url}/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(series))


async def outcomes(url: str) -> tuple[float, float]:
    """Requests that went on, and those that could not."""
    name = "polymorph_worker_interrupted_requests_total"
    return (
        await counted(url, f'{name}{{outcome="continued"}}'),
        await counted(url, f'{name}{{outcome="ended"}}'),
    )


async def runs(house: Any, bus: NatsBus, revision: str, *artifacts: str) -> None:
    async with asyncio.timeout(60):
        while (await house.record(bus)).revision != revision or await house.engaged() != list(artifacts):
            await asyncio.sleep(0.2)


class Before:
    """What holds before each fault: a good kernel, and what the requests give with it."""

    def __init__(self, good: KernelBinding, revision: str, answers: dict[str, dict[str, Any]]) -> None:
        self.good = good
        self.revision = revision
        self.answers = answers


_BEFORE: list[Before] = []


async def before(house: Any, bus: NatsBus, definition: str) -> Before:
    if not _BEFORE:
        good = await house.sign(bus, house.build("-DREFUSES_ABOVE=1000000"), definition)
        async with events(bus) as heard:
            desired = await house.desire(bus, good)
            await told(heard, "loaded", desired.generation)
        _BEFORE.append(Before(good, desired.stable.revision, await ask_all(house.url)))
    return _BEFORE[0]


@pytest.mark.parametrize(
    ("how", "defines"), [("crash", ()), pytest.param("hang", ("-DHANGS",), marks=pytest.mark.slow)]
)
async def test_streams_go_on_without_the_kernel(
    house: Any, bus: NatsBus, definition: str, how: str, defines: tuple[str, ...]
) -> None:
    known = await before(house, bus, definition)
    assert not [name for name, answer in known.answers.items() if answer["error"]]
    interrupted = await outcomes(house.url)
    library = house.build(f"-DFAULT_AT={FAULT_AT}", *defines, source=SOURCE)
    bad = await house.sign(bus, library, definition)
    async with events(bus) as heard:
        desired = await house.desire(bus, bad)
        await told(heard, "loaded", desired.generation)
        answers = await ask_all(house.url)
        fault = await told(heard, "kernel-faulted", desired.generation)
        refused = await told(heard, "refused", desired.generation)
    assert {name: answers[name] for name in CAN_GO_ON} == {name: known.answers[name] for name in CAN_GO_ON}
    waited = 0
    for name, reason in (("penalty", "presence_penalty"), ("grammar", "grammar")):
        if answers[name]["error"] is None:  # it had not begun when the engine died, so it began in the next
            assert answers[name] == known.answers[name]
            waited += 1
            continue
        assert answers[name]["error"]["code"] == 503
        assert reason in answers[name]["error"]["message"]
        sent, whole = answers[name]["tokens"][0], known.answers[name]["tokens"][0]
        assert 0 < len(sent) < TOKENS
        assert sent == whole[: len(sent)]
    assert (fault["artifact"], fault["definition"], fault["how"]) == (bad.artifact, definition, how)
    assert fault["revision"] == desired.stable.revision
    assert "in quarantine" in refused["reason"]
    await runs(house, bus, known.revision, known.good.artifact)
    assert await outcomes(house.url) == (interrupted[0] + 6 + waited, interrupted[1] + 2 - waited)
    # Nobody has put it into the fleet's quarantine here: the worker itself does not take it again.
    async with events(bus) as heard:
        again = await house.desire(bus, bad)
        assert "in quarantine" in (await told(heard, "refused", again.generation))["reason"]
    assert await house.engaged() == [known.good.artifact]


async def test_a_prompt_in_parts_with_a_seed_costs_no_engine(house: Any, bus: NatsBus) -> None:
    """Of vLLM 0.32 it did: its runner rewinds the request's generator, which torch's cannot on a CPU."""
    body = {"model": "tiny-dense", "prompt": [5] * 400, "seed": 3, "max_tokens": 8, "temperature": 0.8}
    async with httpx.AsyncClient(base_url=house.url, timeout=60) as client:
        first = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(6)))
    assert {answer.status_code for answer in first} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in first}) == 1


async def test_what_comes_into_quarantine_is_dropped_where_it_runs(
    house: Any, bus: NatsBus, definition: str
) -> None:
    known = await before(house, bus, definition)
    await house.desire(bus)
    await runs(house, bus, "empty")  # whatever served before, this is what there is to go back to
    await house.desire(bus, known.good)
    async with asyncio.timeout(60):
        while await house.engaged() != [known.good.artifact]:
            await asyncio.sleep(0.2)
    entry = Quarantine(
        artifact=known.good.artifact, reason="it crashed elsewhere", since="2026-01-01T00:00:00Z"
    )
    await bus.kv_put(topology.QUARANTINE, known.good.artifact, entry.model_dump_json().encode())
    await runs(house, bus, "empty")
    await house.desire(bus)
    answers = await ask_all(house.url)
    assert not [name for name, answer in answers.items() if answer["error"]]
