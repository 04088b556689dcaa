"""The demo's client: sends chats as a client would, streams, and counts what came."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

import aiohttp
from benchmarks.demo.trace import TraceRequest

_TIMEOUT = aiohttp.ClientTimeout(total=300, sock_connect=10)


@dataclass(frozen=True)
class Outcome:
    """One finished request; times in seconds."""

    ok: bool
    truncated: bool
    tokens: int
    ttft_s: float
    total_s: float
    text: str = ""
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        return (self.total_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass
class Tally:
    """What all requests of the demo came to."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return sum(not o.ok for o in self.outcomes)

    @property
    def truncated(self) -> int:
        return sum(o.truncated for o in self.outcomes)


class Client:
    """Sends to one OpenAI endpoint."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    async def chat(self, prompt: str, max_tokens: int, *, temperature: float = 0.0) -> Outcome:
        """One streamed chat of exactly `max_tokens` tokens (ignore_eos), so that a cut stream shows."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        begun = time.perf_counter()
        first = 0.0
        tokens, done, text = 0, False, []
        try:
            async with self._session.post(
                f"{self._url}/v1/chat/completions", json=body, timeout=_TIMEOUT
            ) as answer:
                if answer.status != 200:
                    return _failed(begun, f"{answer.status}: {(await answer.text())[:200]}")
                async for event in _events(answer):
                    if event == "[DONE]":
                        done = True
                        continue
                    chunk = json.loads(event)
                    if "error" in chunk:
                        return _failed(begun, str(chunk["error"])[:200])
                    tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                    for choice in chunk.get("choices", ()):
                        if piece := choice["delta"].get("content"):
                            first = first or time.perf_counter()
                            text.append(piece)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return _failed(begun, f"{type(error).__name__}: {error}")
        ended = time.perf_counter()
        return Outcome(
            ok=True,
            truncated=not done or tokens != max_tokens,
            tokens=tokens,
            ttft_s=(first or ended) - begun,
            total_s=ended - begun,
            text="".join(text),
        )


def _failed(begun: float, error: str) -> Outcome:
    return Outcome(
        ok=False, truncated=False, tokens=0, ttft_s=0, total_s=time.perf_counter() - begun, error=error
    )


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield line[6:].strip().decode()


async def replay(
    client: Client, trace: Iterable[TraceRequest], tally: Tally, *, cap: int, until: asyncio.Event
) -> None:
    """Open loop with the trace's arrivals, at most `cap` in flight, repeated until `until` is set."""
    room = asyncio.Semaphore(cap)
    rows = list(trace)
    running: set[asyncio.Task[None]] = set()

    async def send(row: TraceRequest) -> None:
        async with room:
            tally.outcomes.append(await client.chat(row.prompt, row.max_tokens))

    while not until.is_set():
        begun = time.monotonic()
        for row in rows:
            wait = row.at_s - (time.monotonic() - begun)
            if wait > 0 and await _set_within(until, wait):
                break
            if until.is_set():
                break
            if len(running) < 2 * cap:  # what the machine cannot take is not queued for ever
                task = asyncio.create_task(send(row))
                running.add(task)
                task.add_done_callback(running.discard)
    await asyncio.gather(*running)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
