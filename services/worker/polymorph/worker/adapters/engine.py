"""vLLM's AsyncLLM with our slots, as the rest of the worker sees it."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any, Self

from polymorph.engine.draft import DRAFT_CALL
from polymorph.engine.launch import EngineLaunch
from polymorph.engine.loading.admission import Refused
from polymorph.engine.loading.engine import SlottedEngine
from polymorph.worker.adapters import metrics
from polymorph.worker.adapters.memory import with_children
from polymorph.worker.adapters.prometheus import lasting_metrics
from polymorph.worker.adapters.scheduler import Scheduler
from polymorph.worker.adapters.stats import StatSink, stat_logger

_RPC_TIMEOUT_S = 60.0
_END_S = 10.0


class Engine(SlottedEngine):
    """One engine that this worker started."""

    def __init__(self, llm: Any, arguments: Any, *, slotted: bool, dead: type[Exception]) -> None:
        super().__init__(llm, slotted=slotted, dead=dead)
        self.arguments = arguments
        self.scheduler = Scheduler(llm, dead)
        self.flight: Path | None = None
        """Where its ranks tell which kernel they call."""
        self.died = asyncio.Event()

    def most_seqs(self) -> int:
        return int(self.scheduler.seqs or self.arguments.max_num_seqs)

    @classmethod
    def start(cls, launch: EngineLaunch, sink: StatSink) -> Self:
        """Loads and compiles the model; minutes where nothing is in the compile cache. The environment is set."""
        # Forked, it would hold the sockets of clients that this process serves already.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - after the environment is set
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

        from polymorph.worker.adapters.continuing import ContinuingLLM  # noqa: PLC0415

        keywords = launch.arguments()
        arguments = AsyncEngineArgs(**keywords, disable_log_stats=True, enable_logging_iteration_details=True)
        llm = ContinuingLLM.from_engine_args(arguments, stat_loggers=[stat_logger(sink), lasting_metrics()])
        engine = cls(llm, arguments, slotted="worker_extension_cls" in keywords, dead=EngineDeadError)
        llm.recovers = True
        llm.on_death, llm.on_outcome = engine.died.set, metrics.interrupted
        return engine

    @property
    def alive(self) -> bool:
        return not self.llm.dead

    def serve(self, *, seeds_resume: bool) -> None:
        """Listens for answers, and for its own end, from now on. In the event loop."""
        self.llm.seeds_resume = seeds_resume
        self.llm.listen()

    async def kill(self) -> None:
        """Ends its processes now, whatever they do; returns when its requests wait for a successor."""
        manager = self.llm.engine_core.resources.engine_manager
        # Of one that has ended and was waited for, the id may be somebody else's by now.
        living = {process.pid for process in manager.processes if process.is_alive()}
        for pid in with_children(living):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self.died.wait()

    async def succeed(self, heir: "Engine") -> None:
        """Its interrupted requests go on in `heir`."""
        await self.llm.succeed(heir.llm)

    def give_up(self, reason: str) -> None:
        """Its interrupted requests end with an error."""
        self.llm.give_up(reason)

    @property
    def kv_capacity_tokens(self) -> int:
        cache = self.llm.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size)

    @property
    def processes(self) -> list[int]:
        """Ids of the engine's processes; those below them are not listed."""
        started = self.llm.engine_core.resources.engine_manager.processes
        return [process.pid for process in started if process.pid is not None]

    async def draft_weights(self, folder: str) -> float:
        """Loads other weights into the draft model between two steps; returns the seconds that the engine stood still.

        Raises:
            Refused: the engine has no draft model, or not one of that shape; or its weights did not change.
        """
        answer = await self._checked(DRAFT_CALL, path=folder)
        if answer["before"] == answer["after"]:
            raise Refused(f"{folder} was loaded and the draft model's weights are what they were")
        return float(answer["seconds"])

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
