"""The supervisor of embedded mode: starts in order, keeps alive, says what is so, drains."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from polymorph.embedded.child import Child, ChildSpec, last_line
from polymorph.embedded.folder import DataFolder, StartRefused

_PROGRESS_EVERY_S = 15.0


class Supervisor:
    """Runs children in stages: those of a stage start together, the next stage waits until all are ready once."""

    def __init__(
        self, folder: DataFolder, stages: Sequence[Sequence[ChildSpec]], facts: dict[str, Any]
    ) -> None:
        self._folder = folder
        self._stages = [[Child(spec, self._changed) for spec in stage] for stage in stages]
        self._facts = facts
        self._stop = asyncio.Event()
        self._said: dict[str, str] = {}

    @property
    def children(self) -> list[Child]:
        return [child for stage in self._stages for child in stage]

    async def run(self) -> None:
        """Returns when asked to stop (SIGINT, SIGTERM) and everything is down.

        Raises:
            StartRefused: the start cannot work; everything is down again.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        starting = asyncio.create_task(self._start())
        progress = asyncio.create_task(self._progress())
        await self._stop.wait()
        starting.cancel()
        progress.cancel()
        refusal, _ = await asyncio.gather(starting, progress, return_exceptions=True)
        await self._drain()
        if isinstance(refusal, Exception):
            raise refusal

    async def _start(self) -> None:
        begun = time.monotonic()
        try:
            for stage in self._stages:
                for child in stage:
                    child.start()
                await asyncio.gather(*map(self._first_ready, stage))
        except BaseException:
            self._stop.set()
            raise
        self._say(f"everything is ready after {time.monotonic() - begun:.0f} s")

    @staticmethod
    async def _first_ready(child: Child) -> None:
        try:
            await child.wait_ready()
        except Exception as error:  # whatever it was, the start ends with its line
            raise StartRefused(
                f"{child.spec.name}: {error or type(error).__name__}; log {child.spec.log}"
            ) from error

    async def _progress(self) -> None:
        """A start of minutes never stands silent."""
        while True:
            await asyncio.sleep(_PROGRESS_EVERY_S)
            for child in self.children:
                waited = time.monotonic() - child.since
                if child.state in {"starting", "restarting"} and waited > _PROGRESS_EVERY_S:
                    self._say(
                        f"{child.spec.name:<12} {child.state:<10} {waited:4.0f} s  {last_line(child.spec.log)}"
                    )

    async def _drain(self) -> None:
        """The front door first, then what stands behind it; the bus last."""
        self._say("stopping: requests in flight are answered first")
        for rank in sorted({child.spec.drain_rank for child in self.children}):
            stopping = [c for c in self.children if c.spec.drain_rank == rank]
            await asyncio.gather(*(child.stop() for child in stopping))
        self._say("stopped")

    def _changed(self, child: Child) -> None:
        self._write_state()
        if child.state != "stopped":
            note = child.detail or child.spec.where
            self._say_once(child.spec.name, f"{child.spec.name:<12} {child.state:<10} {note}")

    def _write_state(self) -> None:
        children = {
            child.spec.name: {
                "state": child.state,
                "pid": child.pid,
                "restarts": child.restarts,
                "where": child.spec.where,
                "log": str(child.spec.log),
                "detail": child.detail,
            }
            for child in self.children
        }
        try:
            self._folder.write_state({"pid": os.getpid(), **self._facts, "children": children})
        except OSError as error:
            self._say_once(
                "state", f"cannot write {self._folder.state_file}: {error.strerror}; all else goes on"
            )
        else:
            self._said.pop("state", None)

    def _say_once(self, about: str, text: str) -> None:
        if self._said.get(about) != text:
            self._said[about] = text
            self._say(text)

    @staticmethod
    def _say(text: str) -> None:
        # Whoever read our lines may be gone; that is no reason to leave processes behind.
        with contextlib.suppress(OSError, ValueError):
            print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True, file=sys.stdout)
