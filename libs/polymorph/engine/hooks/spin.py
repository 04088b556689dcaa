"""How long an idle engine process keeps a core."""

import functools
import inspect
from typing import Any

from polymorph.engine.hooks.hook import HookMissing, expect

SPIN_S = 0.005


def probe() -> None:
    """VLLM waits for the next step in one class, whose instances tell how long."""
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415 - only an engine process has vLLM

    made = expect(expect(shm_broadcast, "SpinCondition"), "__init__")
    named = set(inspect.unwrap(made).__code__.co_names)
    if not {"is_reader", "busy_loop_s"} <= named:
        raise HookMissing("SpinCondition sets no is_reader and busy_loop_s")


def shorten_spin(seconds: float = SPIN_S) -> None:
    """An engine's process that waits for its next step gives its core back after `seconds`, not after a second.

    vLLM polls its queue of steps with a whole core for a second after each (`SpinCondition.busy_loop_s`), also while
    the engine is paused for a measurement on the same host. Between the steps of a running batch nothing changes.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: PLC0415

    native = SpinCondition.__init__

    @functools.wraps(native)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        native(self, *arguments, **named)
        if self.is_reader:
            self.busy_loop_s = min(self.busy_loop_s, seconds)

    SpinCondition.__init__ = __init__
