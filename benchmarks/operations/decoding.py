"""What kernels of attention and sampling do for whole decode steps: one engine, its slots empty and filled in turn.

    python -m benchmarks.operations.decoding [--model models/smollm2-135m-instruct] [--chats 1 8]

Requests sample with top-p 0.9. Arms of a round run in random order; ratios are of the same round. Prints a table, and one
JSON line last.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

SLOTS = ("linear", "attention", "sampling")
ARMS: dict[str, tuple[str, ...]] = {
    "empty": (),
    "sampling": ("top_k_top_p",),
    "attention": ("attn_decode",),
    "both": ("top_k_top_p", "attn_decode"),
}
"""What is engaged, by the beginning of the definitions' names."""
_STARTED = "POLYMORPH_BENCH_STARTED"
_PROMPT = "Tell me about the rivers of Europe, one after the other, and what grows beside each. "


def start_as_an_engine_would(launch: Any) -> None:
    """Starts this program again with the engine's environment."""
    if _STARTED not in os.environ:
        environment = launch.environment() | {_STARTED: "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        arguments = [sys.executable, "-m", "benchmarks.operations.decoding", *sys.argv[1:]]
        os.execve(sys.executable, arguments, os.environ | environment)  # noqa: S606


class Engine:
    """One engine whose slots are switched between runs."""

    def __init__(self, launch: Any, tokens: int, context: int) -> None:
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - after the environment is set

        from polymorph.kernels.catalogue.artifacts import artifacts  # noqa: PLC0415
        from polymorph.kernels.definitions import definition_named  # noqa: PLC0415

        self._llm = LLM(**launch.arguments())
        self._options = SamplingParams(max_tokens=tokens, top_p=0.9, ignore_eos=True)
        self._prompt = _PROMPT * max(1, context // 18)
        names = self._ask("slots_describe")["definitions"]
        found = [name for name in names if name.startswith(tuple(ARMS["both"]))]
        self._kernels = {name: artifacts(definition_named(name), most=1)[0].binding() for name in found}

    def run(self, arm: str, chats: int) -> tuple[float, dict[str, Any]]:
        """Seconds of a decode step, and the slots' counters."""
        chosen = [each for name, each in self._kernels.items() if name.startswith(ARMS[arm] or ("none",))]
        self._ask("slots_engage", chosen)
        self._seconds(chats, self._one())
        self._ask("slots_read", True)
        began = self._seconds(chats, self._one())
        whole = self._seconds(chats, self._options)
        return (whole - began) / (self._options.max_tokens - 1), self._ask("slots_read")

    def _one(self) -> Any:
        options = self._options.clone()
        options.max_tokens = 1
        return options

    def _seconds(self, chats: int, options: Any) -> float:
        began = time.perf_counter()
        self._llm.generate([f"{n} {self._prompt}" for n in range(chats)], options, use_tqdm=False)
        return time.perf_counter() - began

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._llm.collective_rpc(method, args=arguments)[0]


def share(counters: dict[str, Any], kind: str) -> float:
    """Seconds of a step in the slots of one kind; logits are masked once in a step."""
    steps = sum(_calls(each) for name, each in counters["definitions"].items() if name.startswith("top_k"))
    spent = sum(_ns(each) for name, each in counters["definitions"].items() if name.startswith(kind))
    return spent / 1e9 / steps


def _calls(definition: dict[str, Any]) -> int:
    return sum(int(tally["calls"]) for tally in definition["by_m"].values())


def _ns(definition: dict[str, Any]) -> int:
    return sum(int(tally["ns"]) for tally in definition["by_m"].values())


def main() -> None:
    from polymorph.engine.launch import EngineLaunch  # noqa: PLC0415

    quick = bool(os.environ.get("QUICK"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--chats", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--context", type=int, default=200, help="tokens of a prompt, about")
    parser.add_argument("--tokens", type=int, default=16 if quick else 32)
    parser.add_argument("--rounds", type=int, default=1 if quick else 3)
    options = parser.parse_args()
    launch = EngineLaunch(model=options.model.resolve(), slots=SLOTS, max_model_len=2048)
    start_as_an_engine_would(launch)
    engine, rows, rng = Engine(launch, options.tokens, options.context), [], Random(0)
    for chats in options.chats:
        times: dict[str, list[float]] = {arm: [] for arm in ARMS}
        shares = {}
        for _ in range(options.rounds):
            for arm in rng.sample(list(ARMS), len(ARMS)):
                seconds, counters = engine.run(arm, chats)
                times[arm].append(seconds)
                shares[arm] = {kind: share(counters, kind) / seconds for kind in ARMS["both"]}
        for arm, samples in times.items():
            ratios = [one / other for one, other in zip(times["empty"], samples, strict=True)]
            row = {
                "chats": chats,
                "engaged": arm,
                "step_ms": round(statistics.median(samples) * 1e3, 2),
                "empty_over_it": round(statistics.median(ratios), 3),
                "lowest": round(min(ratios), 3),
                "share": {kind: round(part, 4) for kind, part in shares[arm].items()},
            }
            rows.append(row)
            print(
                f"{chats:3} chats  {arm:10} {row['step_ms']:8.2f} ms a step   {row['empty_over_it']:6.3f} "
                f"(lowest {row['lowest']:.3f})   of it {row['share']}",
                flush=True,
            )
    print(json.dumps({"benchmark": "decoding", "model": options.model.name, "rows": rows}))


if __name__ == "__main__":
    main()
