"""`polymorph up` as a user runs it: the first request of the README, faults while it serves, stop and start again."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from polymorph.embedded.cli import main

sys.path.insert(0, str(Path(__file__).parent))
from running import MODEL, ROOT, SERVED, Instance

pytestmark = [pytest.mark.engine, pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Instance]:
    instance = Instance.start(tmp_path_factory.mktemp("up") / "data", POLYMORPH_EVALUATOR_ENGINE="off")
    try:
        await instance.wait_ready()
        yield instance
    finally:
        instance.process.kill() if instance.process.poll() is None else None
        instance.process.wait(timeout=60)


def readme_block(language: str, containing: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return next(block for block in blocks if containing in block)


async def chat(
    session: aiohttp.ClientSession, url: str, tokens: int, prompt: str = "Hello there"
) -> tuple[int, bool]:
    """Streams one chat; returns the completion tokens and whether the stream ended as it should."""
    body = {
        "model": SERVED,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    counted, done = 0, False
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
    return counted, done


async def test_the_readme_first_request_with_curl(running: Instance) -> None:
    command = readme_block("", "curl http").replace("127.0.0.1:8000", f"127.0.0.1:{running.port}")
    done = await asyncio.to_thread(
        subprocess.run, ["bash", "-ec", command], capture_output=True, text=True, timeout=120, check=True
    )
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert 1 <= answer["usage"]["completion_tokens"] <= 32


async def test_the_readme_first_request_with_the_openai_client(running: Instance) -> None:
    code = readme_block("python", "OpenAI").replace("127.0.0.1:8000", f"127.0.0.1:{running.port}")
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout


async def test_the_openai_client_without_a_stream(running: Instance) -> None:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == [SERVED]
        answer = await client.completions.create(model=SERVED, prompt="def main", max_tokens=8)
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 1


async def test_a_second_start_on_the_same_folder_is_refused(
    running: Instance, capfd: pytest.CaptureFixture[str]
) -> None:
    code = await asyncio.to_thread(main, ["up", "--data", str(running.data), "--model", str(MODEL)])
    assert code == 2
    assert "polymorph down" in capfd.readouterr().err


async def test_status_tells_every_process(running: Instance, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["status", "--data", str(running.data), "--json"]
    state: dict[str, Any] = {"mode": None}
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        while state["mode"] is None:  # a pool has a mode from its first traffic window on
            await chat(session, running.url, 4)
            assert await asyncio.to_thread(main, command) == 0
            state = json.loads(capfd.readouterr().out)
    assert state["mode"] == "observe"
    assert set(state["children"]) == {
        "nats",
        "valkey",
        "router",
        "gateway",
        "worker-0",
        "compiler",
        "evaluator",
    }


async def test_it_says_what_it_serves_only_once_it_does(running: Instance) -> None:
    served = f"{SERVED} on {running.url}/v1"
    first, *rest = (running.data / "up.log").read_text().splitlines()
    assert first.startswith(f"starting; will serve {served} (mode: as this data folder has it")
    assert len([line for line in rest if f"ready: serves {served} (mode " in line]) == 1
    assert not [line for line in rest if "settings {" in line or "Triton" in line]


@pytest.mark.parametrize("victim", ["nats", "router", "compiler", "evaluator", "valkey"])
async def test_killing_it_fails_no_request_and_the_loop_goes_on(running: Instance, victim: str) -> None:
    """8 streams run and a new request starts each second while the victim dies and comes back."""
    before = running.pid(victim)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as session:
        streams = [asyncio.create_task(chat(session, running.url, 200, f"stream {i}")) for i in range(8)]
        await asyncio.sleep(0.5)
        os.kill(before, signal.SIGKILL)
        fresh = []
        deadline = time.monotonic() + 120
        while running.pid(victim) == before or not await ready(running):
            assert time.monotonic() < deadline, running.log()
            fresh.append(asyncio.create_task(chat(session, running.url, 8)))
            await asyncio.sleep(1)
        for _ in range(2):
            fresh.append(asyncio.create_task(chat(session, running.url, 8)))
            await asyncio.sleep(1)
        assert await asyncio.gather(*streams) == [(200, True)] * 8
        assert await asyncio.gather(*fresh) == [(8, True)] * len(fresh)
        await window_with_requests(session, running)


async def ready(running: Instance) -> bool:
    children = running.state()["children"]
    return all(child["state"] == "ready" for child in children.values())


async def window_with_requests(session: aiohttp.ClientSession, running: Instance) -> None:
    """A traffic window that counts requests made from now on: telemetry, router, JetStream and gateway work again."""
    sending = asyncio.create_task(keep_sending(session, running.url))
    try:
        async with asyncio.timeout(90):
            async with session.get(f"{running.url}/v1/events") as answer:
                async for line in answer.content:
                    if line.startswith(b"data:"):
                        event = json.loads(line[5:])
                        if (
                            event.get("type", "").endswith("shape-observed.v1")
                            and event["data"]["shape"]["requests"]
                        ):
                            return
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def keep_sending(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        await chat(session, url, 4)
        await asyncio.sleep(0.2)


async def test_stop_answers_what_is_in_flight_and_a_second_start_goes_on(running: Instance) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as session:
        stream = asyncio.create_task(chat(session, running.url, 300))
        await asyncio.sleep(1.0)
        stopping = asyncio.create_task(asyncio.to_thread(running.stop))
        assert await stream == (300, True)
        assert await stopping == 0
        second = Instance.start(running.data, port=running.port, POLYMORPH_EVALUATOR_ENGINE="off")
        try:
            await second.wait_ready()
            kept = f"ready: serves {SERVED} on {second.url}/v1 (mode observe); everything is ready after"
            async with asyncio.timeout(30):
                while kept not in (running.data / "up.log").read_text():
                    await asyncio.sleep(0.1)
            first_event = await first_stored_event(session, second.url)
            assert first_event["type"].startswith("polymorph.evt.")
            assert await chat(session, second.url, 4) == (4, True)
        finally:
            assert await asyncio.to_thread(second.stop) == 0


async def first_stored_event(session: aiohttp.ClientSession, url: str) -> dict[str, object]:
    """The first event since the first start: it was written before this process began."""
    async with (
        asyncio.timeout(30),
        session.get(f"{url}/v1/events", headers={"Last-Event-ID": "0-0"}) as answer,
    ):
        async for line in answer.content:
            if line.startswith(b"data:"):
                event: dict[str, object] = json.loads(line[5:])
                return event
    raise AssertionError("no event")
