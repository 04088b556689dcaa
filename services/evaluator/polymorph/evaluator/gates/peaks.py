"""Measures what this machine's memory and arithmetic give, with our own code, in the sandbox."""

import math
import time

from polymorph.evaluator.adapters.sandbox.buffers import Window
from polymorph.evaluator.adapters.sandbox.lane import Lane
from polymorph.evaluator.domain.roofline import Peaks

_BYTES = 128 << 20
_ROUNDS = 1 << 21
_TRIES = 5


def measure(lane: Lane) -> Peaks:
    """The best of several tries: a disturbed try only reads too low."""
    threads = len(lane.machine.cpus)
    window = Window(_BYTES)
    window.bytes[:] = 1
    reads, arithmetic = [], []
    with lane.process({}) as process:
        fd = window.descriptor(writable=False)
        process.ask("map", fds=(fd,), name="memory", length=window.length, writable=False)
        for _ in range(_TRIES):
            began = time.perf_counter()
            process.ask("peaks", kind="read", name="memory", threads=threads)
            reads.append(time.perf_counter() - began)
            began = time.perf_counter()
            done = process.ask("peaks", kind="arithmetic", rounds=_ROUNDS, threads=threads)["done"]
            arithmetic.append((time.perf_counter() - began) / max(float(done), 1.0))
    window.close()
    best = min(arithmetic)
    return Peaks(_BYTES / min(reads), 2 / best if best > 0 else math.inf)
