"""From a launch to a seat: the engine's process, vLLM's application over it, and both ended again."""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from polymorph.config.clock import Clock
from polymorph.engine import resume
from polymorph.engine.dispatcher.build import DispatcherBuildError, ensure_built
from polymorph.engine.flight import FLIGHT_VARIABLE
from polymorph.engine.launch import EngineLaunch
from polymorph.engine.support import Verdict
from polymorph.telemetry.log import configure
from polymorph.worker.adapters.engine import Engine
from polymorph.worker.adapters.server import application
from polymorph.worker.domain.patience import start_told
from polymorph.worker.seat import Seat
from polymorph.worker.seats import EngineNotStarted
from polymorph.worker.telling import Telling

_log = logging.getLogger(__name__)
_PROGRESS_S = 15.0


class Seating:
    """Opens and closes seats of one worker. `flights` is a folder of this worker alone."""

    def __init__(self, telling: Telling, clock: Clock, log_level: str, flights: Path) -> None:
        self._telling = telling
        self._clock = clock
        self._log_level = log_level
        self._flights = flights.resolve()
        shutil.rmtree(self._flights, ignore_errors=True)  # of an earlier run, whose engines ended with it
        self._lifespans: dict[Seat, contextlib.AsyncExitStack] = {}

    async def open(self, launch: EngineLaunch) -> Seat:
        """Raises `EngineNotStarted` where no engine comes of `launch`."""
        sink = self._telling.open()
        try:
            engine = await self._engine(launch, sink)
            return await self._seat(engine, launch, sink)
        except Exception as error:
            self._telling.close(sink)
            # vLLM's processes write their cause to standard error, and it says "above" here.
            reason = str(error).replace("See root cause above.", "The cause stands in the worker's log.")
            raise EngineNotStarted(f"the engine does not start: {reason}") from error

    async def close(self, seat: Seat) -> None:
        """Ends the engine and its application."""
        stack = self._lifespans.pop(seat, None)
        await asyncio.to_thread(seat.engine.stop)
        if seat.engine.flight is not None:
            shutil.rmtree(seat.engine.flight, ignore_errors=True)
        self._telling.close(seat.sink)
        if stack is not None:
            await stack.aclose()

    async def _engine(self, launch: EngineLaunch, sink: Any) -> Engine:
        if launch.slots:
            await asyncio.to_thread(_built)
        # A new engine's processes inherit these; one that runs has read its own.
        flight = self._flight()
        os.environ.update(launch.environment() | {FLIGHT_VARIABLE: str(flight)})
        starting = asyncio.ensure_future(asyncio.to_thread(Engine.start, launch, sink))
        began = self._clock.monotonic()
        while not starting.done():
            _log.info("%s", start_told(self._clock.monotonic() - began))
            await asyncio.wait({starting}, timeout=_PROGRESS_S)
        engine = await starting
        engine.flight = flight
        engine.serve(seeds_resume=resume.supported(flight))
        return engine

    def _flight(self) -> Path:
        self._flights.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self._flights))

    async def _seat(self, engine: Engine, launch: EngineLaunch, sink: Any) -> Seat:
        stack = contextlib.AsyncExitStack()
        try:
            app = await application(engine, launch)
            configure("worker", self._log_level)  # vLLM has set levels of its own meanwhile
            await stack.enter_async_context(app.router.lifespan_context(app))
            seat = Seat(engine, app, launch, sink, await engine.definitions(), await engine.missing())
        except BaseException:
            await asyncio.to_thread(engine.stop)
            raise
        self._lifespans[seat] = stack
        for feature in engine.features:
            level = logging.INFO if feature.verdict is Verdict.SUPPORTED else logging.WARNING
            _log.log(level, "%s is %s", feature.name, feature.told())
        return seat


def _built() -> None:
    try:
        ensure_built()
    except DispatcherBuildError as error:
        raise EngineNotStarted(str(error)) from error
