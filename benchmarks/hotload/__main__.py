"""Kernels of several operations swapped in a compiled engine under load, by promotions as in production.

    python -m benchmarks.hotload [--model DIR] [--swaps 200] [--streams 8]

Every swap is a signed desired state that one more kernel differs in; the worker verifies, tests, engages and reads it
back. Blocks with swaps and blocks without alternate under the same streams. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.hotload.artifacts import kernels_for, operation
from benchmarks.hotload.house import Failed, House, house
from benchmarks.hotload.measures import empty_slots, slot_call_us
from benchmarks.hotload.streams import PROMPTS, Answer, Streams, ask

from polymorph.engine.hooks import HOOKS
from polymorph.events.values import KernelBinding
from polymorph.kernels.isa import hardware_fingerprint

ROOT = Path(__file__).parents[2]
QUICK = bool(os.environ.get("QUICK"))
TOKENS = 96
MOST_M = 8
BLOCK_SWAPS = 10
VARIANTS = 5


@dataclass
class Swaps:
    """What was swapped, and when."""

    done: int = 0
    failed: int = 0
    reasons: list[str] = field(default_factory=list)
    artifacts: set[str] = field(default_factory=set)
    operations: set[str] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)
    paused_s: list[float] = field(default_factory=list)
    blocks: list[tuple[tuple[float, float], tuple[float, float]]] = field(default_factory=list)
    """Pairs of (begin, end): with swaps, without."""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


async def definitions(home: House) -> list[str]:
    """What the worker has slots for, one definition an operation and two where there are many layers."""
    from polymorph.bus import topology  # noqa: PLC0415
    from polymorph.events.state import WorkerRecord  # noqa: PLC0415

    async with asyncio.timeout(60):
        while True:
            for key in await home.bus.kv_keys(topology.WORKERS):
                entry = await home.bus.kv_get(topology.WORKERS, key)
                record = WorkerRecord.model_validate_json(entry.value or b"")
                if record.slots:
                    return list(record.slots)
            await asyncio.sleep(0.5)


async def swap(home: House, table: dict[str, KernelBinding], swaps: Swaps, changed: KernelBinding) -> None:
    """Promotes the table with one kernel changed; counts it as failed where it did not come to run."""
    wanted = {**table, changed.definition: changed}
    began = time.monotonic()
    try:
        told = await home.promote(tuple(wanted.values()))
    except Failed as error:
        swaps.failed += 1
        swaps.reasons.append(f"{changed.definition}: {str(error)[:200]}")
        return
    served = told["served"]
    if not (isinstance(served, dict) and served.get(changed.artifact, 0) > 0):
        swaps.failed += 1
        swaps.reasons.append(f"{changed.definition}: {changed.artifact[:12]} was engaged and served nothing")
        return
    table[changed.definition] = changed
    swaps.done += 1
    swaps.artifacts.add(changed.artifact)
    swaps.operations.add(operation(changed.definition))
    swaps.seconds.append(time.monotonic() - began)
    swaps.paused_s.append(float(str(told["paused_s"])))


async def swapped(home: House, kernels: dict[str, tuple[KernelBinding, ...]], count: int) -> Swaps:
    """Blocks of swaps, each followed by as long a block without, until `count` swaps were tried."""
    swaps = Swaps()
    table: dict[str, KernelBinding] = {}
    names = list(kernels)
    say(f"first load of {sum(map(len, kernels.values()))} kernels: verified and self-tested, each once")
    for variant in range(VARIANTS):
        for name in names:
            if variant < len(kernels[name]):
                await swap(home, table, Swaps(), kernels[name][variant])
    tried = 0
    while tried < count:
        began = time.monotonic()
        for _ in range(min(BLOCK_SWAPS, count - tried)):
            name = names[tried % len(names)]
            choices = [
                each for each in kernels[name] if each.artifact != getattr(table.get(name), "artifact", "")
            ]
            await swap(home, table, swaps, choices[tried // len(names) % len(choices)])
            tried += 1
        middle = time.monotonic()
        await asyncio.sleep(middle - began)
        swaps.blocks.append(((began, middle), (middle, time.monotonic())))
        say(
            f"{tried} of {count} swaps, {swaps.failed} failed, {statistics.median(swaps.seconds or [0]):.2f} s each"
        )
    return swaps


def p99(answers: list[Answer], within: tuple[float, float]) -> float:
    gaps = sorted(gap for answer in answers for at, gap in answer.gaps if within[0] <= at < within[1])
    return gaps[int(len(gaps) * 0.99)] if gaps else float("nan")


async def reference(url: str) -> tuple[dict[int, str], float]:
    """Greedy texts of the engine's own code at eight streams, and how often it agrees with itself alone."""
    async with aiohttp.ClientSession() as session:
        alone = [await ask(session, url, number, TOKENS) for number in range(len(PROMPTS))]
        together = await asyncio.gather(
            *(ask(session, url, number, TOKENS) for number in range(len(PROMPTS)))
        )
    texts = {answer.prompt: answer.text for answer in together}
    return texts, statistics.fmean(answer.text == texts[answer.prompt] for answer in alone)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    slots = tuple(options.slots.split(","))
    async with house(folder, options.model, slots, options.streams) as home:
        found = await definitions(home)
        say(f"the worker has slots for {', '.join(found)}")
        texts, incumbent = await reference(home.url)
        kernels = {}
        for name in found:
            made = await kernels_for(home, name, options.variants, MOST_M)
            if len(made) > 1:
                kernels[name] = made
        streams = Streams(home.url, options.streams, TOKENS)
        running = asyncio.create_task(streams.run())
        swaps = await swapped(home, kernels, options.swaps)
        streams.stop()
        await running
    answers = streams.answers
    ratios = [p99(answers, one) / p99(answers, other) for one, other in swaps.blocks]
    return {
        "swaps": swaps.done,
        "operations": len(swaps.operations),
        "artifacts": len(swaps.artifacts),
        "failed_swaps": swaps.failed,
        "reasons": sorted(set(swaps.reasons))[:5],
        "requests": len(answers),
        "failed": sum(not answer.ok for answer in answers),
        "truncated": sum(answer.ok and not answer.whole for answer in answers),
        "greedy_agreement": round(statistics.fmean(a.text == texts[a.prompt] for a in answers), 3),
        "greedy_agreement_incumbent": round(incumbent, 3),
        "itl_p99_ratio": round(statistics.median(ratios), 3),
        "itl_p99_ratio_worst_block": round(max(ratios), 3),
        "swap_seconds": round(statistics.median(swaps.seconds), 3),
        "engine_paused_s": round(statistics.median(swaps.paused_s), 5),
        "by_operation": sorted(swaps.operations),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-dense")
    parser.add_argument("--slots", default=",".join(HOOKS), help="slots of the worker's engine")
    parser.add_argument("--swaps", type=int, default=20 if QUICK else 200)
    parser.add_argument("--variants", type=int, default=2 if QUICK else VARIANTS, help="kernels a definition")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3 if QUICK else 11)
    options = parser.parse_args()
    options.model = options.model.resolve()
    with tempfile.TemporaryDirectory(prefix="polymorph-hotload-") as folder:
        found = asyncio.run(measure(options, Path(folder)))
    say("what a call of a slot costs")
    call = slot_call_us(5 if QUICK else 25)
    say(f"{call['slot_us']:.2f} us beside {call['bare_us']:.2f} us of the bare operator")
    from polymorph.engine.launch import DEFAULT_SLOTS  # noqa: PLC0415

    empty = empty_slots(options.model, DEFAULT_SLOTS, options.rounds, 64 if QUICK else 128, say)
    print(
        json.dumps(
            {
                "benchmark": "hotload",
                "model": options.model.name,
                "hardware": hardware_fingerprint(),
                **found,
                "slot_call_us": round(call["slot_us"], 3),
                **{name: round(value, 5) for name, value in empty.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
