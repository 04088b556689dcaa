"""Clients that stream without a pause, and note when each piece came."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

PROMPTS = (
    "def merge(left, right):",
    "The river rises in the hills north of",
    '{"level": "info", "message": "request',
    "Question: why do the days grow shorter?",
    "SELECT customer, SUM(amount) FROM orders",
    "To make a simple bread, mix flour and",
    "Dear committee, thank you for the",
    "The theorem follows by induction on",
)
_TIMEOUT = aiohttp.ClientTimeout(total=300)


@dataclass
class Answer:
    """One finished stream. `gaps` are the seconds between two of its pieces."""

    prompt: int
    text: str
    ok: bool
    whole: bool
    began: float
    pieces: list[float] = field(default_factory=list)

    def within(self, span: tuple[float, float]) -> bool:
        """Whether it began and ended in a span of monotonic seconds."""
        return self.whole and span[0] <= self.began and self.pieces[-1] < span[1]

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Each gap with the time at which it ended."""
        return [(b, b - a) for a, b in zip(self.pieces, self.pieces[1:], strict=False)]


class Streams:
    """`count` clients on one endpoint, each sending its next request when the last is answered."""

    def __init__(self, url: str, count: int, tokens: int) -> None:
        self._url = url
        self._count = count
        self._tokens = tokens
        self.answers: list[Answer] = []
        self._stop = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Within the block, and then until the last stream has ended."""
        self._stop.clear()
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            clients = [asyncio.create_task(self._client(session, number)) for number in range(self._count)]
            try:
                yield
            finally:
                self._stop.set()
                await asyncio.gather(*clients)

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self._stop.is_set():
            self.answers.append(await ask(session, self._url, number % len(PROMPTS), self._tokens))


async def ask(session: aiohttp.ClientSession, url: str, prompt: int, tokens: int) -> Answer:
    """One greedy stream of exactly `tokens` tokens."""
    body = {
        "model": "bench",
        "prompt": PROMPTS[prompt],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer(prompt, "", ok=False, whole=False, began=time.monotonic())
    text: list[str] = []
    counted, done = 0, False
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer.ok = response.status == 200
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                event = line[6:].strip()
                if event == b"[DONE]":
                    done = True
                    continue
                chunk = json.loads(event)
                answer.ok = answer.ok and "error" not in chunk
                counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
                if chunk.get("choices"):
                    answer.pieces.append(time.monotonic())
                    text.append(chunk["choices"][0]["text"])
    except (aiohttp.ClientError, TimeoutError, OSError):
        answer.ok = False
    answer.text = "".join(text)
    answer.whole = done and counted == tokens
    return answer


def p99(answers: Iterable[Answer], within: tuple[float, float]) -> float:
    """The gap in seconds that one in a hundred of those exceeds that ended in a span; NaN where none did."""
    gaps = sorted(gap for answer in answers for at, gap in answer.gaps if within[0] <= at < within[1])
    return gaps[int(len(gaps) * 0.99)] if gaps else float("nan")
