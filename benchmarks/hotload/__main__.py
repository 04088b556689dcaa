"""Kernels of several operations swapped in a compiled engine under load, by promotions as in production.

    python -m benchmarks.hotload [--model DIR] [--swaps 200] [--streams 8]

Every swap is a signed desired state that one kernel differs in; the worker verifies, tests, engages and reads it back.
Blocks with swaps and blocks without alternate under the same streams. Beside it, while nothing changes: what empty slots,
a call and a profiled step cost. The last line is one JSON object; docs/benchmarks.md says how to read it.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.hotload.agreement import Agreement
from benchmarks.hotload.artifacts import kernels_for, one_each
from benchmarks.hotload.house import House, house
from benchmarks.hotload.still import Still
from benchmarks.hotload.streams import Streams, p99
from benchmarks.hotload.swaps import Kernels, Span, Swapping, Swaps

from polymorph.engine.hooks import HOOKS
from polymorph.kernels.isa import hardware_fingerprint

ROOT = Path(__file__).parents[2]
QUICK = os.environ.get("QUICK", "") not in {"", "0"}
TOKENS = 96
MOST_M = 8
REST_S = 20.0
_BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - _BEGAN:6.1f} s  {text}", flush=True)


def still_costs(still: Still, options: argparse.Namespace) -> dict[str, float]:
    """While the worker has nothing to do, and no stream runs."""
    still.ready()
    say("two engines to compare, with the product's own slots and without, are warm")
    call = still.call_us(60 if QUICK else 300)
    say(f"a slot adds {call['slot_us']:.2f} us to {call['bare_us']:.2f} us of the bare operator")
    empty = still.empty_slots(options.rounds, 32, say)
    profiled = still.profiled(6 if QUICK else 24, 64, say)
    return {"slot_call_us": call["slot_us"], **empty, **profiled}


async def swapped(home: House, options: argparse.Namespace) -> dict[str, Any]:
    """Streams: first with empty slots, then while kernels are loaded for the first time, then while they are swapped.

    A short run loads them while no stream runs, which takes a third of the time.
    """
    streams = Streams(home.url, options.streams, TOKENS)
    swapping = Swapping(home, say)
    async with streams.running():
        called = await home.called(MOST_M)
        say(f"the traffic calls {', '.join(called)}")
        kernels = await built(home, one_each(called)[:5] if QUICK else called, options.variants)
        began = time.monotonic()
        await asyncio.sleep(options.calm_s)
        calm = (began, time.monotonic())
        first = Swaps() if QUICK else await swapping.first_loads(kernels, REST_S)
    if QUICK:
        first = await swapping.first_loads(kernels)
    async with streams.running():
        swaps = await swapping.blocks(kernels, options.swaps, options.block)
    return report(streams, calm, first, swaps)


async def built(home: House, definitions: list[str], variants: int) -> Kernels:
    """Those that have more than one kernel."""
    kernels: Kernels = {}
    for name in definitions:
        made = await kernels_for(home, name, variants, MOST_M)
        if len(made) > 1:
            kernels[name] = made
    say(f"{sum(map(len, kernels.values()))} kernels of {len(kernels)} definitions are built and signed")
    return kernels


def report(streams: Streams, calm: Span, first: Swaps, swaps: Swaps) -> dict[str, Any]:
    answers = streams.answers
    agreement = Agreement([answer for answer in answers if answer.within(calm)])
    changing = [answer for answer in answers if answer.began >= calm[1] and answer.whole]
    pairs = [(p99(answers, one), p99(answers, other)) for one, other in swaps.blocks]
    loading = [] if QUICK else [p99(answers, one) / p99(answers, other) for one, other in first.blocks]
    return {
        "swaps": swaps.done,
        "operations": len(swaps.operations),
        "artifacts": len(swaps.artifacts),
        "first_loads": first.done,
        "failed_swaps": swaps.failed + first.failed,
        "reasons": sorted({*first.reasons, *swaps.reasons})[:5],
        "requests": len(answers),
        "failed": sum(not answer.ok for answer in answers),
        "truncated": sum(answer.ok and not answer.whole for answer in answers),
        "greedy_agreement": agreement.of(changing),
        "greedy_agreement_incumbent": agreement.incumbent,
        "itl_p99_ratio": statistics.median(one / other for one, other in pairs),
        "itl_p99_ratio_highest": max(one / other for one, other in pairs),
        "itl_p99_ms": statistics.median(one for one, _ in pairs) * 1e3,
        "itl_p99_ms_without": statistics.median(other for _, other in pairs) * 1e3,
        "itl_p99_ratio_first_loads": statistics.median(loading) if loading else None,
        "swap_s": statistics.median(swaps.seconds or [0.0]),
        "first_load_s": statistics.median(first.seconds or [0.0]),
        "engine_paused_ms": statistics.median(swaps.paused_s or [0.0]) * 1e3,
        "by_operation": sorted(swaps.operations),
    }


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    slots = tuple(options.slots.split(","))
    say("a worker and two engines to compare start, which takes a minute or two")
    with Still(options.model, folder / "still.log") as still:
        async with house(folder, options.model, slots, options.streams) as home:
            say("the worker is ready")
            costs = await asyncio.to_thread(still_costs, still, options)
            still.close()
            return await swapped(home, options) | costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-dense")
    parser.add_argument("--slots", default=",".join(HOOKS), help="slots of the worker's engine")
    parser.add_argument("--swaps", type=int, default=12 if QUICK else 200)
    parser.add_argument("--block", type=int, default=6 if QUICK else 10, help="swaps without a rest")
    parser.add_argument("--variants", type=int, default=2 if QUICK else 3, help="kernels a definition")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument(
        "--calm-s", type=float, default=4.0 if QUICK else 20.0, help="streams before any swap"
    )
    parser.add_argument("--rounds", type=int, default=40 if QUICK else 600, help="pairs of engines")
    options = parser.parse_args()
    options.model = options.model.resolve()
    with tempfile.TemporaryDirectory(prefix="polymorph-hotload-") as folder:
        found = asyncio.run(measure(options, Path(folder)))
    told = {"benchmark": "hotload", "model": options.model.name, "hardware": hardware_fingerprint()}
    rounded = {name: round(each, 5) if isinstance(each, float) else each for name, each in found.items()}
    print(json.dumps(told | rounded))


if __name__ == "__main__":
    main()
