"""What slots cost while nothing changes: an engine with empty slots against one without, a call, a profiled step."""

import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

from benchmarks.hotload import arm

from polymorph.engine.installation import PROFILE_VARIABLE
from polymorph.engine.launch import DEFAULT_SLOTS, EngineLaunch
from polymorph.stats.blocks import median_ratio

CHATS = 8
_SAID_EVERY = 10
PROFILE_EVERY_S = 10.0
"""How far apart profiled steps are in production."""

Say = Callable[[str], None]


class Arm:
    """A process that answers orders through a pipe."""

    def __init__(self, process: ForkServerProcess, pipe: Connection, log: Path) -> None:
        self._process = process
        self._pipe = pipe
        self._log = log

    def ask(self, **order: Any) -> dict[str, Any]:
        self._pipe.send(order)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._pipe.recv()
        except EOFError:
            last = self._log.read_text(errors="replace")[-1500:]
            raise RuntimeError(f"a process of the measurement ended: {last}") from None
        return answer

    def seconds(self, tokens: int) -> float:
        """Of a batch of greedy requests."""
        return float(self.ask(chats=CHATS, tokens=tokens)["seconds"])

    def profile(self, every_s: float) -> None:
        self.ask(method="slots_profile", keywords={"every_s": every_s})

    def close(self) -> None:
        self._pipe.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()


class Still:
    """Two engines in processes of their own, forked from one that has imported vLLM; started at once, awaited later."""

    def __init__(self, model: Path, log: Path) -> None:
        self._stack = ExitStack()
        self._log = log
        self._context = multiprocessing.get_context("forkserver")
        launch = arm.launch_of(model, DEFAULT_SLOTS)
        with _environment(launch), _output_to(log):
            self._context.set_forkserver_preload(arm.PRELOADED)
            forkserver.ensure_running()
        self._plain = self._start(arm.engine, launch.without_slots())
        self._slotted = self._start(arm.engine, launch)
        self._awaited = [self._plain, self._slotted]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends both engines, and whatever else was started here. Idempotent."""
        self._stack.close()

    def ready(self) -> None:
        """Returns when both engines are warm."""
        while self._awaited:
            self._awaited.pop().answer()
        self._slotted.profile(0.0)

    def call_us(self, rounds: int) -> dict[str, float]:
        """What the dispatcher adds to a bare operator of vLLM's, in microseconds a call."""
        return self._start(arm.call, rounds).answer()

    def empty_slots(self, rounds: int, tokens: int, say: Say) -> dict[str, float]:
        """Tokens a second with the product's own slots, empty, against none: the median of pairs, with its 95 % interval."""
        plain: list[float] = []
        slotted: list[float] = []
        for number in range(rounds):
            for engine in (self._plain, self._slotted) if number % 2 else (self._slotted, self._plain):
                (plain if engine is self._plain else slotted).append(engine.seconds(tokens))
            if (number + 1) % _SAID_EVERY == 0:
                so_far = median_ratio(slotted, plain)
                say(f"empty slots, {number + 1} of {rounds} pairs: {so_far.point:.3f}")
        ratio = median_ratio(slotted, plain)
        return {"empty_slot_ratio": ratio.point, "empty_slot_low": ratio.low, "empty_slot_high": ratio.high}

    def profiled(self, rounds: int, tokens: int, say: Say) -> dict[str, float]:
        """Every step profiled against none: what one costs, and so what one in ten seconds does."""
        added = []
        for number in range(rounds):
            self._slotted.profile(0.0)
            none = self._slotted.seconds(tokens)
            self._slotted.profile(1e-9)
            every = self._slotted.seconds(tokens)
            added.append((every - none) / tokens)
            say(f"profiled steps, pair {number + 1} of {rounds}: {added[-1] * 1e3:.2f} ms a step")
        self._slotted.profile(0.0)
        cost = max(0.0, statistics.median(added))
        return {"profiled_step_adds_ms": cost * 1e3, "profile_overhead": cost / PROFILE_EVERY_S}

    def _start(self, target: Callable[..., None], argument: EngineLaunch | int) -> Arm:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, argument), daemon=True)
        process.start()
        theirs.close()
        started = Arm(process, ours, self._log)
        self._stack.callback(started.close)
        return started


@contextmanager
def _environment(launch: EngineLaunch) -> Iterator[None]:
    """For the server of forks alone: what else this process starts has variables of its own."""
    before = dict(os.environ)
    os.environ.update(
        launch.in_process_environment() | {"VLLM_LOGGING_LEVEL": "ERROR", PROFILE_VARIABLE: "0"}
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """What the server of forks and its children print."""
    kept = [os.dup(stream) for stream in (1, 2)]
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        yield
    finally:
        for stream, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, stream)
            os.close(descriptor)
