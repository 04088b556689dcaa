"""Seeded requests that go on in another engine: the generator of each is brought to where the first one had it.

vLLM gives a seeded request a generator of its own, made anew where the request is added. A request that is added a
second time, with the tokens that were sent as part of its prompt, has to leave out as many draws. Hooked into vLLM's
CPU runner in the engine's worker process, tried on the runner itself before anybody relies on it: `supported` tells.

The same generator can be rewound, which torch's for CPUs cannot (vLLM 0.32 does so after each part of a prompt that is
computed in parts, and a seeded request with such a prompt would end the engine).
"""

import functools
import logging
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from polymorph.engine.flight import FLIGHT_VARIABLE

_log = logging.getLogger(__name__)

DRAWS = "polymorph_draws"
"""Key of `SamplingParams.extra_args`: draws that were made for the request before."""
MOST_DRAWS = 1 << 20
_DONE = "resume.ok"
_WORKER = "VllmWorker-"
_SEEDS = 1 << 31


class Generator(torch.Generator):  # type: ignore[misc]  # no types of torch here
    """A generator of one draw a token. `kept` tells how many draws count: after a rewind, exactly those are made."""

    seeded_with: int
    kept: Callable[[], int]

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Leaves out the last draw: vLLM rewinds where it discards a token."""
        del offset
        self.manual_seed(self.seeded_with)
        draw(self, self.kept())


def draw(generator: torch.Generator, times: int) -> None:
    """Draws as vLLM's sampler for CPUs does, once a token."""
    for _ in range(times):
        torch.randint(0, _SEEDS, (1,), generator=generator, dtype=torch.long)


def supported(folder: Path) -> bool:
    """Whether the engine with this flight folder brings generators to where they were."""
    return (folder / _DONE).exists()


def install() -> None:
    """Hooks the runner of this process, where it is an engine's worker and was asked for a flight record."""
    folder = os.environ.get(FLIGHT_VARIABLE)
    if folder is None or not multiprocessing.current_process().name.startswith(_WORKER):
        return
    try:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # noqa: PLC0415 - only a worker has it
    except ImportError as error:
        _log.warning("seeded requests do not outlive this engine: %s", error)
        return
    hook(CPUModelRunner, Path(folder))


def hook(runner: Any, folder: Path) -> None:
    """Hooks the runner class `runner`, once; each instance is tried when its model is loaded."""
    if hasattr(runner, "_polymorph_resumes"):
        return
    missing = [name for name in ("load_model", "_update_states") if not callable(getattr(runner, name, None))]
    if missing:
        _log.warning("seeded requests do not outlive this engine: no %s in vLLM's runner", ", ".join(missing))
        return
    load, update = runner.load_model, runner._update_states  # noqa: SLF001

    @functools.wraps(load)
    def load_model(self: Any, *arguments: Any, **named: Any) -> Any:
        answer = load(self, *arguments, **named)
        reason = hindrance(self)
        if reason is None:
            (folder / _DONE).touch()
        else:
            _log.warning("seeded requests do not outlive this engine: %s", reason)
        self._polymorph_resumes = reason is None
        return answer

    @functools.wraps(update)
    def _update_states(self: Any, scheduled: Any) -> Any:
        answer = update(self, scheduled)
        if self._polymorph_resumes:
            for added in scheduled.scheduled_new_reqs:
                _resume(self, added.req_id)
        return answer

    runner._polymorph_resumes = False  # noqa: SLF001
    runner.load_model, runner._update_states = load_model, _update_states  # noqa: SLF001


def hindrance(runner: Any) -> str | None:
    """Why this runner's draws are not known; None where a trial gave what is expected."""
    if getattr(runner, "speculative_config", None) is not None:
        return "draft tokens are accepted by draws that depend on the batch"
    try:
        sampler = runner.sampler.topk_topp_sampler
        tried, expected = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
        for _ in range(2):
            sampler(torch.zeros(2, 16), {1: tried}, None, None)
        draw(expected, 2)
    except (AttributeError, TypeError, RuntimeError) as error:
        return f"vLLM's sampler is another one: {error}"
    if not torch.equal(tried.get_state(), expected.get_state()):
        return "vLLM's sampler draws otherwise"
    return None


def _resume(runner: Any, request_id: str) -> None:
    state = runner.requests.get(request_id)
    if state is None or state.generator is None:
        return
    before = _draws_before(state.sampling_params)
    generator = Generator()
    generator.seeded_with = state.sampling_params.seed
    generator.kept = lambda: before + len(state.output_token_ids)
    generator.set_offset(0)
    state.generator = generator
    index = runner.input_batch.req_id_to_index.get(request_id)
    if index is not None:
        runner.input_batch.generators[index] = generator


def _draws_before(sampling: Any) -> int:
    given = (sampling.extra_args or {}).get(DRAWS, 0)
    return min(max(given, 0), MOST_DRAWS) if isinstance(given, int) else 0
