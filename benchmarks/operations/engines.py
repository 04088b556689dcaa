"""What slots cost and gain in a compiled engine: engines that differ in their slots alone generate in turn.

    python -m benchmarks.operations.engines [--model models/tiny-dense] [--batch 1 8] [--rounds 12]

The base has slots for linear layers alone, so that Inductor fuses all else. Each other engine has one slot more, empty
and with the catalogue's first kernel, and the last one all of them. Prints a table of tokens/s against the base, and one
JSON line last.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Self

import numpy as np
from benchmarks.operations.models import MODELS
from benchmarks.operations.paired import fastest

from polymorph.engine.launch import EngineLaunch
from polymorph.kernels.isa import hardware_fingerprint
from polymorph.stats.blocks import paired_ratio

BASE = "linear"
SLOTS = ("rms_norm", "silu_and_mul", "rotary")


class Engine:
    """A process that holds an engine."""

    def __init__(self, model: Path, slots: str) -> None:
        launch = EngineLaunch(model=model, slots=tuple(slots.split(",")))
        environment = os.environ | launch.in_process_environment() | {"VLLM_LOGGING_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.operations.engine_arm", str(model), slots],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *told: object) -> None:
        self._process.terminate()
        self._process.wait()

    def generate(self, **command: Any) -> dict[str, Any]:
        """See `engine_arm.Arm.generate`."""
        if self._process.stdin is None:
            raise RuntimeError("the engine has no standard input")
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"an engine ended with {self._process.wait()}: see what it printed above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def compared(
    arms: dict[str, tuple[Engine, bool]], batch: int, tokens: int, rounds: int, rng: Random
) -> list[dict[str, Any]]:
    """Every arm but the base against the base, over rounds in which each generates the same once, in random order."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    same: dict[str, list[bool]] = {name: [] for name in arms}
    for number in range(-1, rounds):  # one round to warm up
        told: dict[str, dict[str, Any]] = {}
        for name in rng.sample(sorted(arms), len(arms)):
            engine, kernels = arms[name]
            told[name] = engine.generate(batch=batch, tokens=tokens, seed=number, kernels=kernels)
            if kernels and not told[name]["served"]:
                raise RuntimeError(f"{name}: no kernel served")
        if number >= 0:
            for name, answer in told.items():
                seconds[name].append(answer["seconds"])
                same[name].append(answer["tokens"] == told[BASE]["tokens"])
    rows = []
    for name in arms:
        ratio = paired_ratio(seconds[name], seconds[BASE], np.random.default_rng(0))
        undisturbed = fastest(seconds[BASE]) / fastest(seconds[name])
        rows.append(
            {
                "arm": name,
                "batch": batch,
                "tokens_per_s": round(batch * tokens / fastest(seconds[name]), 1),
                "undisturbed": round(undisturbed, 4),
                "against_base": [round(value, 4) for value in (ratio.point, ratio.low, ratio.high)],
                "equal_rounds": round(statistics.mean(same[name]), 3),
            }
        )
    return rows


def main() -> None:
    quick = bool(os.environ.get("QUICK"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODELS / "tiny-dense")
    parser.add_argument("--slots", nargs="*", default=[*SLOTS, ",".join(SLOTS)])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=16 if quick else 64)
    parser.add_argument("--rounds", type=int, default=3 if quick else 12)
    options = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        arms: dict[str, tuple[Engine, bool]] = {}
        arms[BASE] = (stack.enter_context(Engine(options.model, BASE)), False)
        for slots in options.slots:
            engine = stack.enter_context(Engine(options.model, f"{BASE},{slots}"))
            arms |= {f"{slots} empty": (engine, False), f"{slots} served": (engine, True)}
        for batch in options.batch:
            found = compared(arms, batch, options.tokens, options.rounds, Random(batch))
            rows += found
            for row in found:
                point, low, high = row["against_base"]
                print(
                    f"{row['arm']:36} batch {batch:<3} {row['tokens_per_s']:9.1f} tokens/s   "
                    f"{point:.3f} [{low:.3f}, {high:.3f}], undisturbed {row['undisturbed']:.3f}   equal {row['equal_rounds']:.2f}",
                    flush=True,
                )
    told = {"benchmark": "operation_engines", "model": options.model.name, "hardware": hardware_fingerprint()}
    print(json.dumps(told | {"rows": rows}))


if __name__ == "__main__":
    main()
