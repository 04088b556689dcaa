"""How many steps this rank has computed: what shows that several ranks changed their kernels at the same one."""

import functools
import logging
from typing import Any

from polymorph.engine.hooks.hook import HookMissing, expect, expect_parameters

_log = logging.getLogger(__name__)


class Steps:
    """Counts from the process's start. `known` is False where vLLM runs steps in another way than this counts."""

    def __init__(self) -> None:
        self.count = 0
        self.known = False

    def install(self) -> None:
        """Counts each call of the model from now on; the count is left unknown where vLLM is not as expected."""
        try:
            wrapper = probe()
        except HookMissing as reason:
            _log.error(
                "steps are not counted, so ranks cannot show that they change at the same one: %s", reason
            )
            return
        native = wrapper.execute_model

        @functools.wraps(native)
        def execute_model(worker: Any, scheduler_output: Any) -> Any:
            self.count += 1
            return native(worker, scheduler_output)

        wrapper.execute_model = execute_model
        self.known = True


def probe() -> Any:
    """The class through which every rank is told to compute a step.

    Raises:
        HookMissing: it is not there, or takes something else.
    """
    from vllm.v1.worker import worker_base  # noqa: PLC0415 - only an engine process has vLLM

    wrapper = expect(worker_base, "WorkerWrapperBase")
    expect_parameters(expect(wrapper, "execute_model"), "self", "scheduler_output")
    return wrapper
