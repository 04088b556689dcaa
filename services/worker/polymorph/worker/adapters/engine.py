"""vLLM's AsyncLLM with our slots, as the rest of the worker sees it."""

import asyncio
import os
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any, Self

from polymorph.bus.errors import Retryable
from polymorph.engine.bindings import SlotBinding
from polymorph.engine.draft import DRAFT_CALL
from polymorph.engine.launch import EngineLaunch
from polymorph.worker.adapters.prometheus import lasting_metrics
from polymorph.worker.adapters.scheduler import Scheduler
from polymorph.worker.adapters.stats import StatSink, stat_logger
from polymorph.worker.domain.admission import Refused
from polymorph.worker.domain.counters import NOTHING, Counters
from polymorph.worker.domain.request_ids import SELF_PREFIX

_RPC_TIMEOUT_S = 60.0
_SLICE_S = 0.05


class Engine:
    """One engine. Calls of its slots run between two steps and never raise for a refusal by the engine: `Refused`."""

    def __init__(self, llm: Any, arguments: Any, *, slotted: bool, dead: type[Exception]) -> None:
        self.llm = llm
        self.arguments = arguments
        self.slotted = slotted
        self.scheduler = Scheduler(llm, dead)
        self._requests = 0
        self._dead = dead

    @classmethod
    def start(cls, launch: EngineLaunch, sink: StatSink) -> Self:
        """Loads and compiles the model; minutes where nothing is in the compile cache. The environment is set."""
        # Forked, it would hold the sockets of clients that this process serves already.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - after the environment is set
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

        keywords = launch.arguments()
        arguments = AsyncEngineArgs(**keywords, disable_log_stats=True, enable_logging_iteration_details=True)
        llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[stat_logger(sink), lasting_metrics()])
        return cls(llm, arguments, slotted="worker_extension_cls" in keywords, dead=EngineDeadError)

    @property
    def alive(self) -> bool:
        return not self.llm.errored

    @property
    def kv_capacity_tokens(self) -> int:
        cache = self.llm.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size)

    @property
    def max_model_len(self) -> int:
        return int(self.llm.model_config.max_model_len)

    @property
    def processes(self) -> list[int]:
        """Ids of the engine's processes; those below them are not listed."""
        started = self.llm.engine_core.resources.engine_manager.processes
        return [process.pid for process in started if process.pid is not None]

    async def definitions(self) -> tuple[str, ...]:
        if not self.slotted:
            return ()
        return tuple((await self._call("slots_describe"))["definitions"])

    async def counters(self) -> Counters:
        if not self.slotted:
            return NOTHING
        return Counters.of(await self._call("slots_read"))

    async def engage(self, bindings: Iterable[SlotBinding], *, keep_packed: bool = False) -> float:
        """Makes `bindings` all that the slots run; returns the seconds that the engine stood still for it.

        Weights are packed a little at a time, so that no step waits for long.

        Raises:
            Refused: the engine cannot run them; what ran goes on.
        """
        documents = [vars(binding) for binding in bindings]
        if not self.slotted:
            if documents:
                raise Refused("this engine was started without slots")
            return 0.0
        stood = 0.0
        left = 1
        while left and documents:
            began = time.monotonic()
            left = (await self._checked("slots_prepare", bindings=documents, seconds=_SLICE_S))["left"]
            stood += min(time.monotonic() - began, _SLICE_S)
            await asyncio.sleep(_SLICE_S)
        return stood + await self._flipped(documents, keep_packed=keep_packed)

    async def _flipped(self, documents: list[dict[str, Any]], *, keep_packed: bool) -> float:
        """All ranks make the table ready and then flip at one step, or none does; the seconds that the last one took."""
        began = time.monotonic()
        try:
            await self._checked("slots_stage", bindings=documents)
        except Refused:
            await self._checked("slots_abandon")
            raise
        staged = time.monotonic() - began
        flipped = await self._all("slots_flip", keep_packed=keep_packed)
        _raise_for_parted(flipped)
        return staged + max(float(answer["seconds"]) for answer in flipped)

    async def draft_weights(self, folder: str) -> float:
        """Loads other weights into the draft model between two steps; returns the seconds that the engine stood still.

        Raises:
            Refused: the engine has no draft model, or not one of that shape; or its weights did not change.
        """
        answer = await self._checked(DRAFT_CALL, path=folder)
        if answer["before"] == answer["after"]:
            raise Refused(f"{folder} was loaded and the draft model's weights are what they were")
        return float(answer["seconds"])

    async def capture(
        self,
        definition: str,
        calls: int,
        every: int,
        min_m: int,
        max_m: int,
        *,
        max_mib: int = 64,
        ring: bool = False,
    ) -> None:
        """Keeps inputs of one call in `every`: the first `calls` that come, or as a ring the last."""
        await self._checked(
            "slots_capture",
            definition=definition,
            calls=calls,
            every=every,
            min_m=min_m,
            max_m=max_m,
            max_mib=max_mib,
            ring=ring,
        )

    async def captured(self, directory: Path) -> list[dict[str, Any]]:
        """Ends the capture; a path of inputs, one of the weight, and M, for each call."""
        calls: list[dict[str, Any]] = (await self._checked("slots_captured", directory=str(directory)))[
            "calls"
        ]
        return calls

    async def exercise(self, m: int) -> None:
        """Makes the engine compute steps of about `m` tokens, with requests of the worker's own."""
        seqs = int(self.scheduler.seqs or self.arguments.max_num_seqs)
        if m <= seqs:
            await asyncio.gather(*(self._generate(length=2, tokens=2) for _ in range(m)))
        else:
            await self._generate(length=min(m, self.max_model_len - 2), tokens=1)

    async def pause(self) -> None:
        """Stops between two steps, keeping all requests and caches; returns when the engine stands.

        The scheduler stops at once, but a step that it has handed out may still run: a call that the engine's process
        answers comes behind it.
        """
        # AsyncLLM.pause_generation adds a sleep of 20 ms, which would be taken from requests.
        await self._guarded(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
        await self._guarded(self.llm.collective_rpc("check_health", timeout=_RPC_TIMEOUT_S))

    async def resume(self) -> None:
        await self._guarded(self.llm.resume_generation())

    def stop(self) -> None:
        """Dead or alive. Whoever reads its answers ends first: this end is no fault to be told."""
        handler = getattr(self.llm, "output_handler", None)
        if handler is not None and not handler.done():
            handler.get_loop().call_soon_threadsafe(handler.cancel)
        self.llm.shutdown(timeout=0)

    async def _generate(self, length: int, tokens: int) -> None:
        from vllm import SamplingParams  # noqa: PLC0415

        self._requests += 1
        # Another first token each time: a prompt that is in the prefix cache would be computed in fewer tokens.
        vocabulary = int(self.llm.model_config.get_vocab_size())
        prompt = {
            "prompt_token_ids": [(self._requests * 31 + position) % vocabulary for position in range(length)]
        }
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        async for _ in self.llm.generate(prompt, sampling, request_id=f"{SELF_PREFIX}{self._requests}"):
            pass

    async def _call(self, method: str, **keywords: Any) -> dict[str, Any]:
        """The first rank's answer."""
        return (await self._all(method, **keywords))[0]

    async def _all(self, method: str, **keywords: Any) -> list[dict[str, Any]]:
        """Every rank's answer, in the order of ranks."""
        answers: list[dict[str, Any]] = await self._guarded(
            self.llm.collective_rpc(method, timeout=_RPC_TIMEOUT_S, kwargs=keywords)
        )
        return answers

    async def _guarded(self, call: Awaitable[Any]) -> Any:
        """An engine that does not answer may answer later, or is about to be found dead."""
        try:
            return await call
        except (RuntimeError, TimeoutError, self._dead) as error:
            raise Retryable(f"the engine does not answer: {error}") from error

    async def _checked(self, method: str, **keywords: Any) -> dict[str, Any]:
        """The first rank's answer, where all ranks agree; `left` is that of the rank with the most to do."""
        answers = await self._all(method, **keywords)
        for rank, answer in enumerate(answers):
            if not answer["ok"]:
                where = f"rank {rank} of {len(answers)}: " if len(answers) > 1 else ""
                raise Refused(f"{where}{answer['reason']}")
        if "left" in answers[0]:
            return answers[0] | {"left": max(answer["left"] for answer in answers)}
        return answers[0]


def _raise_for_parted(flipped: list[dict[str, Any]]) -> None:
    """Ranks that change at different steps compute one token by two revisions.

    Raises:
        Refused: they did.
    """
    steps = [answer.get("step") for answer in flipped]
    if len(set(steps)) > 1:
        raise Refused(f"the ranks changed at different steps: {', '.join(map(str, steps))}")
    if not all(answer["ok"] for answer in flipped):
        raise Refused("; ".join(answer["reason"] for answer in flipped if not answer["ok"]))
