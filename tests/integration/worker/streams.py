"""Clients that stream from a worker, or from a gateway before it."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx

DONE = "data: [DONE]"


@dataclass(frozen=True)
class Streamed:
    """Tokens by the answer's own count (a piece may hold several), the last line, and the revision that answered."""

    tokens: int
    last: str
    revision: str

    def whole(self, tokens: int) -> bool:
        return self.last == DONE and self.tokens == tokens


async def stream(url: str, number: int, tokens: int) -> Streamed:
    body = {
        "model": "tiny-dense",
        "prompt": f"stream number {number}",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    counted, last = 0, ""
    async with (
        httpx.AsyncClient(timeout=200) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line[6:]).get("usage") or {"completion_tokens": counted}
                counted = usage["completion_tokens"]
            last = line or last
    return Streamed(counted, last, answer.headers["x-polymorph-revision"])


class Load:
    """Streams that follow each other on some lanes until told to end."""

    def __init__(self, url: str, lanes: int, tokens: int) -> None:
        self._ending = False
        self._tokens = tokens
        self._done: list[Streamed] = []
        self._lanes = [asyncio.create_task(self._lane(url, lane)) for lane in range(lanes)]

    async def _lane(self, url: str, lane: int) -> None:
        while not self._ending:
            self._done.append(await stream(url, lane, self._tokens))

    async def end(self) -> set[str]:
        """Raises where a stream failed or was cut; the revisions that answered."""
        self._ending = True
        await asyncio.gather(*self._lanes)
        cut = [each for each in self._done if not each.whole(self._tokens)]
        assert not cut, cut
        return {each.revision for each in self._done}


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """What a client puts together from an answer, streamed or not."""
    seen: dict[str, Any] = {"texts": {}, "tokens": {}, "logprobs": {}, "usage": None, "error": None}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        text = (await answer.aread()).decode()
    events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    parts = [json.loads(each) for each in (events if body.get("stream") else [text])]
    for part in parts:
        seen["error"] = part.get("error") or seen["error"]
        seen["usage"] = part.get("usage") or seen["usage"]
        for choice in part.get("choices", ()):
            index = choice["index"]
            seen["texts"][index] = seen["texts"].get(index, "") + choice["text"]
            seen["tokens"].setdefault(index, []).extend(choice["token_ids"] or ())
            logprobs = choice["logprobs"] or {"tokens": []}
            seen["logprobs"].setdefault(index, []).extend(logprobs["tokens"])
    return seen
