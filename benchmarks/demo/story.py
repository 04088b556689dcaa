"""Follows the event stream of the gateway and tells the loop as it happens."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Story:
    """The events seen so far, by name, with the numbers that the table needs."""

    events: list[dict[str, Any]] = field(default_factory=list)
    last_search_event: float = 0.0  # in seconds of the monotonic clock

    def named(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["type"] == f"polymorph.evt.{name}.v1"]

    @property
    def promotions(self) -> list[dict[str, Any]]:
        return self.named("promotion.completed")

    @property
    def stolen_s(self) -> float:
        return float(sum(e["data"]["stolen_s"] for e in self.named("worker.host-leased")))

    def drift_to_promotion_s(self) -> float | None:
        """Seconds from the first drift to the first promotion that answers it."""
        started = {e["data"]["drift_id"]: e["time"] for e in self.named("traffic.drift-detected")}
        for promotion in self.promotions:
            if (begun := started.get(promotion["data"].get("drift_id"))) is not None:
                return _seconds(promotion["time"]) - _seconds(begun)
        return None


def _seconds(text: str) -> float:
    import datetime as dt  # noqa: PLC0415 - one use

    return dt.datetime.fromisoformat(text).timestamp()


async def follow(session: aiohttp.ClientSession, url: str, story: Story, say: Callable[[str], None]) -> None:
    """Reads `GET /v1/events` until cancelled, going on after the last id when the stream breaks."""
    last = "0-0"
    while True:
        try:
            timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
            async with session.get(
                f"{url}/v1/events", headers={"Last-Event-ID": last}, timeout=timeout
            ) as answer:
                answer.raise_for_status()
                async for raw in answer.content:
                    line = raw.decode().rstrip("\n")
                    if line.startswith("id:"):
                        last = line[3:].strip()
                    elif line.startswith("data:"):
                        _note(story, json.loads(line[5:]), say)
        except (aiohttp.ClientError, TimeoutError, OSError):
            await asyncio.sleep(0.5)


def _note(story: Story, event: dict[str, Any], say: Callable[[str], None]) -> None:
    if "type" not in event:
        return
    story.events.append(event)
    if ".search." in event["type"]:
        story.last_search_event = time.monotonic()
    if text := sentence(event):
        say(text)


def sentence(event: dict[str, Any]) -> str | None:
    """One line for a person; None for what would only fill the screen."""
    name = event["type"].removeprefix("polymorph.evt.").removesuffix(".v1")
    data = event["data"]
    tell = _TELL.get(name)
    return f"{name:<24} {tell(data)}" if tell else None


def _shape(data: dict[str, Any]) -> str:
    shape = data["shape"]
    return (
        f"{shape['requests']} requests, {shape['concurrency']:.1f} in flight, prompts {shape['prompt_tokens']['p50']:.0f}, "
        f"outputs {shape['output_tokens']['p50']:.0f} tokens, {data['output_tokens_per_s']:.0f} tokens/s, runs {data['revision']}"
    )


def _verdict(data: dict[str, Any]) -> str:
    speed = data.get("speedup")
    ratio = f" {speed['point']:.3f}x [{speed['low']:.3f}, {speed['high']:.3f}]" if speed else ""
    return f"{data['candidate_id']} {data['verdict']} at {data['gate']}{ratio}: {data['reason']}"


_TELL: dict[str, Callable[[dict[str, Any]], str]] = {
    "traffic.shape-observed": _shape,
    "traffic.drift-detected": lambda d: d["reason"],
    "search.opened": lambda d: d["reason"],
    "search.closed": lambda d: f"{d['outcome']}: {d['reason']}",
    "candidate.proposed": lambda d: f"{d['candidate_id']} for {d['definition']}: {d['pattern']}",
    "candidate.evaluated": _verdict,
    "promotion.completed": lambda d: f"generation {d['generation']}: {d['reason']}",
    "promotion.rolled-back": lambda d: d["reason"],
    "worker.loaded": lambda d: (
        f"{d['worker_id']} runs {d['revision']} ({d['served_calls']} calls served, engine stood {d['paused_s'] * 1000:.0f} ms)"
    ),
    "worker.refused": lambda d: f"{d['worker_id']} refused {d['revision']}: {d['reason']}",
}


class Clock:
    """Prints lines with the minutes since the demo began."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun

    def say(self, text: str) -> None:
        minutes, seconds = divmod(int(self.elapsed_s), 60)
        print(f"[{minutes:02d}:{seconds:02d}] {text}", flush=True)
