"""A double of vLLM's engine process: its next token is a function of all tokens before it, and it dies when told to.

A double since no real engine can be stopped after exactly so many tokens. A request with a seed draws from a generator
made for it, as in vLLM's runner, with `polymorph.engine.resume` in effect.
"""

import asyncio
import hashlib
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.outputs import LogprobsLists

from polymorph.engine.resume import DRAWS, draw

VOCABULARY = 600


@dataclass
class _Running:
    request: Any
    tokens: list[int]
    generator: torch.Generator | None
    made: int = 0


class ScriptedCore:
    """One token for each request and step. `steps` is how many it makes before it dies; None: for ever."""

    engine_ranks_managed = (0,)

    def __init__(self, steps: int | None = None) -> None:
        self.resources = types.SimpleNamespace(engine_dead=False)
        self.steps = steps
        self.added: list[Any] = []
        self.running: dict[str, _Running] = {}
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        self._alive()
        self.added.append(request)
        sampling = request.sampling_params
        generator = None
        if sampling.seed is not None and sampling.temperature:
            generator = torch.Generator().manual_seed(sampling.seed)
            draw(generator, (sampling.extra_args or {}).get(DRAWS, 0))
        self.running[request.request_id] = _Running(request, list(request.prompt_token_ids), generator)
        self._loop = self._loop or asyncio.create_task(self._run())
        self._work.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for each in request_ids:
            self.running.pop(each, None)

    async def get_output_async(self) -> Any:
        output = await self._outputs.get()
        if isinstance(output, Exception):
            raise output
        return output

    def die(self) -> None:
        self.resources.engine_dead = True
        self._outputs.put_nowait(EngineDeadError())

    def shutdown(self, timeout: float | None = None) -> None:
        del timeout
        if self._loop is not None:
            self._loop.cancel()

    def _alive(self) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            if self.steps == 0:
                self.die()
                return
            self.steps = None if self.steps is None else self.steps - 1
            outputs = [self._step(each) for each in list(self.running.values())]
            self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs))
            if not self.running:
                self._work.clear()
            await asyncio.sleep(0)

    def _step(self, running: _Running) -> EngineCoreOutput:
        request, sampling = running.request, running.request.sampling_params
        salt = int(torch.randint(0, 1 << 31, (1,), generator=running.generator)) if running.generator else 0
        token = next_token(running.tokens, salt)
        running.tokens.append(token)
        running.made += 1
        finish = _finish(sampling, token, running.made)
        if finish is not None:
            self.running.pop(request.request_id)
        first = running.made == 1
        times = (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[token],
            new_logprobs=_logprobs(running.tokens) if sampling.logprobs is not None else None,
            finish_reason=finish,
            events=[EngineCoreEvent.new_event(each) for each in times] if first else None,
        )


def next_token(tokens: list[int], salt: int = 0) -> int:
    digest = hashlib.sha256(repr((tokens, salt)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % VOCABULARY


def _finish(sampling: Any, token: int, made: int) -> FinishReason | None:
    if token in (sampling.stop_token_ids or ()) and made > sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if made >= sampling.max_tokens else None


def _logprobs(tokens: list[int]) -> LogprobsLists:
    """The token's own and one other's, told by the whole sequence."""
    value = -1 - len(tokens) / 1000
    return LogprobsLists(
        np.array([[tokens[-1], (tokens[-1] + 1) % VOCABULARY]]),
        np.array([[value, value - 1]], dtype=np.float32),
        np.array([1]),
        None,
    )


def make_async_mp_client(cores: Callable[[], ScriptedCore]) -> Callable[..., ScriptedCore]:
    """In place of vLLM's function of that name."""

    def make(*_: Any, **__: Any) -> ScriptedCore:
        return cores()

    return make
