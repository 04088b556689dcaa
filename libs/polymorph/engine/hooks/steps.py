"""Every step that this rank computes: counted, timed, and now and then profiled."""

import functools
import logging
from typing import Any

from polymorph.engine.hooks.hook import HookMissing, expect, expect_parameters
from polymorph.engine.profile import StepProfile

_log = logging.getLogger(__name__)


class Steps:
    """Counts from the process's start: what shows that several ranks changed their kernels at the same step.

    `known` is False where vLLM runs steps in another way than this counts.
    """

    def __init__(self, profile: StepProfile) -> None:
        self.profile = profile
        self.count = 0
        self.known = False

    def install(self) -> None:
        """Counts each call of the model from now on; nothing is counted where vLLM is not as expected."""
        try:
            wrapper, base = probe()
        except (HookMissing, ImportError) as reason:
            _log.error("steps are neither counted nor profiled: %s", reason)
            return
        self._count(wrapper)
        self._end_with_sampling(base)
        self.known = True

    def _count(self, wrapper: Any) -> None:
        native = wrapper.execute_model

        @functools.wraps(native)
        def execute_model(worker: Any, scheduler_output: Any) -> Any:
            self.count += 1
            self.profile.begin(scheduler_output.total_num_scheduled_tokens)
            output = native(worker, scheduler_output)
            if output is not None:  # else the step goes on in `sample_tokens`
                self.profile.end()
            return output

        wrapper.execute_model = execute_model

    def _end_with_sampling(self, base: Any) -> None:
        native = base.sample_tokens

        @functools.wraps(native)
        def sample_tokens(worker: Any, grammar_output: Any) -> Any:
            output = native(worker, grammar_output)
            self.profile.end()
            return output

        base.sample_tokens = sample_tokens


def probe() -> tuple[Any, Any]:
    """The class through which every rank is told to compute a step, and the one that samples.

    Raises:
        HookMissing: they are not there, or take something else.
    """
    from vllm.v1.worker import gpu_worker, worker_base  # noqa: PLC0415 - only an engine process has vLLM

    wrapper = expect(worker_base, "WorkerWrapperBase")
    expect_parameters(expect(wrapper, "execute_model"), "self", "scheduler_output")
    base = expect(gpu_worker, "Worker")
    expect_parameters(expect(base, "sample_tokens"), "self", "grammar_output")
    return wrapper, base
