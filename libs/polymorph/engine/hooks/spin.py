"""How long an idle engine process keeps a core, and how long it sleeps over a message whose call was lost."""

import functools
import inspect
import time
from typing import Any

from polymorph.engine.hooks.hook import HookMissing, expect

SPIN_S = 0.005
NEAR_S, NEAR_MS = 1.0, 2
"""Since its last message: for so long it looks for the next one every so many milliseconds."""
FAR_MS = 100
"""After that."""


def probe() -> None:
    """VLLM waits for the next step in one class, whose instances tell how long."""
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415 - only an engine process has vLLM

    condition = expect(shm_broadcast, "SpinCondition")
    _expect_names(condition, "__init__", "is_reader", "busy_loop_s", "last_read")
    _expect_names(condition, "wait", "last_read", "busy_loop_s", "poll")


def _expect_names(condition: Any, method: str, *names: str) -> None:
    function = inspect.unwrap(expect(condition, method))
    missing = [name for name in names if name not in function.__code__.co_names]
    if missing:
        raise HookMissing(f"SpinCondition.{method} knows no {' and no '.join(missing)}")


def shorten_spin(seconds: float = SPIN_S) -> None:
    """An engine's process that waits for its next step gives its core back after `seconds`, not after a second.

    vLLM polls its queue of steps with a whole core for a second after each (`SpinCondition.busy_loop_s`), also while
    the engine is paused for a measurement on the same host. Who sleeps instead is called through a socket that may drop
    the call where two come within a millisecond or so, and vLLM looks again after five seconds only: in that second of
    polling it hardly ever matters, and without it streams would stand still for five. So sleep is short here.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: PLC0415

    native, native_wait = SpinCondition.__init__, SpinCondition.wait

    @functools.wraps(native)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        native(self, *arguments, **named)
        if self.is_reader:
            self.busy_loop_s = min(self.busy_loop_s, seconds)

    @functools.wraps(native_wait)
    def wait(self: Any, timeout_ms: int | None = None) -> None:
        most = NEAR_MS if time.monotonic() - self.last_read < NEAR_S else FAR_MS
        native_wait(self, most if timeout_ms is None else min(timeout_ms, most))

    SpinCondition.__init__, SpinCondition.wait = __init__, wait
