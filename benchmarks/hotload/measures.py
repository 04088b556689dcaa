"""What slots cost while nothing changes: a call, an engine with empty slots against one without, a profiled step."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from polymorph.embedded.child import die_with_parent
from polymorph.engine.launch import EngineLaunch

CALL = """
import json, os, statistics, time, torch
from vllm import _custom_ops
from vllm.platforms import current_platform
current_platform.import_kernels()
from polymorph.engine.dispatcher.ops import load
torch.set_num_threads(1)
ops, n, k = load(), 32, 32
weight = torch.randn(n, k)
handler = _custom_ops.create_onednn_mm(weight.t(), 32)
slot = ops.add_linear(f"gemm_n{n}_k{k}_f32", n, k, 0, handler.handler_tensor)
x = torch.randn(1, k)
def bare():
    y = torch.empty(1, n)
    torch.ops._C.onednn_mm(y, x, None, handler.handler_tensor)
    return y
def slotted():
    return ops.linear(x, None, slot, n)
def timed(call, count=2000):
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count * 1e6
for call in (bare, slotted):
    timed(call)
pairs = [(timed(bare), timed(slotted)) for _ in range(ROUNDS)]
print(json.dumps({"bare_us": statistics.median(b for b, _ in pairs),
                  "slot_us": statistics.median(s - b for b, s in pairs)}))
"""


class Child:
    """An engine in another process."""

    def __init__(self, model: Path, slots: Sequence[str]) -> None:
        launch = EngineLaunch(model=model, slots=tuple(slots))
        environment = {**os.environ, **launch.environment(), "VLLM_LOGGING_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "child.py"), str(model), ",".join(slots)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - there is one thread here
        )
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def seconds(self, chats: int, tokens: int) -> float:
        """Of a batch of greedy requests."""
        return float(self._ask({"chats": chats, "tokens": tokens})["seconds"])

    def rpc(self, method: str, **keywords: object) -> dict[str, Any]:
        return self._ask({"method": method, "keywords": keywords})

    def _ask(self, order: dict[str, object]) -> dict[str, Any]:
        if self._process.stdin is None:
            raise RuntimeError("the engine's process takes no orders")
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        if self._process.stdout is None:
            raise RuntimeError("the engine's process gives no answers")
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError("the engine's process ended")


def slot_call_us(rounds: int) -> dict[str, float]:
    """What the dispatcher adds to a bare operator of vLLM's, in microseconds a call; medians over paired rounds."""
    launch = EngineLaunch(model=Path())
    done = subprocess.run(
        [sys.executable, "-c", CALL.replace("ROUNDS", str(rounds))],
        env={**os.environ, **launch.environment(), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def empty_slots(
    model: Path, slots: Sequence[str], rounds: int, tokens: int, say: Callable[[str], None]
) -> dict[str, float]:
    """Tokens a second with empty slots against none (two engines, interleaved), and what a profiled step adds."""
    with Child(model, ()) as plain, Child(model, slots) as slotted:
        slotted.rpc("slots_profile", every_s=0.0)
        ratios = []
        for number in range(rounds):
            first, second = (plain, slotted) if number % 2 else (slotted, plain)
            times = {first: first.seconds(8, tokens), second: second.seconds(8, tokens)}
            ratios.append(times[plain] / times[slotted])
            say(f"empty slots, pair {number + 1} of {rounds}: {ratios[-1]:.3f}")
        overhead = _profile(slotted, rounds, tokens, say)
    return {"empty_slot_ratio": statistics.median(ratios), "lowest": min(ratios), **overhead}


def _profile(engine: Child, rounds: int, tokens: int, say: Callable[[str], None]) -> dict[str, float]:
    """Every step profiled against none: what one costs, and so what one in ten seconds does."""
    added = []
    for number in range(rounds):
        engine.rpc("slots_profile", every_s=0.0)
        none = engine.seconds(8, tokens)
        engine.rpc("slots_profile", every_s=1e-9)
        every = engine.seconds(8, tokens)
        added.append((every - none) / tokens)
        say(f"profiled steps, pair {number + 1} of {rounds}: {added[-1] * 1e3:.2f} ms a step")
    engine.rpc("slots_profile", every_s=0.0)
    cost = max(0.0, statistics.median(added))
    return {"profiled_step_adds_ms": cost * 1e3, "profile_overhead": cost / 10.0}
