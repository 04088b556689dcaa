"""The supervisor of embedded mode: starts in order, keeps alive, says what is so, drains."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from polymorph.embedded.child import Child, ChildSpec
from polymorph.embedded.folder import DataFolder, StartRefused

_PROGRESS_EVERY_S = 15.0
_DRAIN_EVERY_S = 5.0
_SAME_PRESS_S = 0.5  # one Ctrl-C may reach us twice: by the terminal's group and passed on by who started us


class Supervisor:
    """Runs children in stages: those of a stage start together, the next stage waits until all are ready once."""

    def __init__(
        self,
        folder: DataFolder,
        stages: Sequence[Sequence[ChildSpec]],
        facts: dict[str, Any],
        serves: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """`serves` says what is served, in words for the line that tells that all is ready."""
        self._folder = folder
        self._stages = [[Child(spec, self._changed) for spec in stage] for stage in stages]
        self._facts = facts
        self._serves = serves
        self._stop = asyncio.Event()
        self._asked_at = 0.0
        self._drains = ""
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
            loop.add_signal_handler(number, self._asked_to_stop, number)
        starting = asyncio.create_task(self._start())
        progress = asyncio.create_task(self._progress())
        await self._stop.wait()
        self._asked_at = self._asked_at or time.monotonic()  # a refused start stops without a signal
        starting.cancel()
        progress.cancel()
        refusal, _ = await asyncio.gather(starting, progress, return_exceptions=True)
        await self._drain()
        if isinstance(refusal, Exception):
            raise refusal

    def _asked_to_stop(self, number: int) -> None:
        """The first signal drains; a SIGINT after it ends everything at once."""
        again = self._stop.is_set() and time.monotonic() - self._asked_at > _SAME_PRESS_S
        if again and number == signal.SIGINT:
            self._say("stopping now: what is in flight is cut off")
            for child in self.children:
                if child.state != "stopped":
                    child.stop_now()
        elif not self._stop.is_set():
            self._asked_at = time.monotonic()
            self._stop.set()

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
        took = f"everything is ready after {time.monotonic() - begun:.0f} s"
        self._say(took if self._serves is None else f"ready: {await self._serves()}; {took}")

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
                    line = f"{child.spec.name:<12} {child.state:<10} {waited:4.0f} s  {child.start_told()}"
                    self._say(line.rstrip())

    async def _drain(self) -> None:
        """The front door first, then what stands behind it; the bus last."""
        self._say("stopping: requests in flight are answered first; Ctrl-C again stops now")
        for rank in sorted({child.spec.drain_rank for child in self.children}):
            stopping = [c for c in self.children if c.spec.drain_rank == rank]
            telling = asyncio.create_task(self._tell_drain(stopping))
            await asyncio.gather(*(child.stop() for child in stopping))
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
        self._say("stopped")

    async def _tell_drain(self, stopping: Sequence[Child]) -> None:
        """Every few seconds: what is waited for, and until when. `polymorph down` tells the same from the state."""
        deadline = time.monotonic() + max(child.spec.drain_s for child in stopping)
        while True:
            await asyncio.sleep(_DRAIN_EVERY_S)
            waits = [await _waits_for(child) for child in stopping if child.state == "draining"]
            if not waits:
                continue
            left = max(0.0, deadline - time.monotonic())
            self._drains = f"draining: {', '.join(waits)}, at most {left:.0f} s more"
            self._write_state()
            self._say(f"{self._drains}; Ctrl-C again stops now")

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
            drains = {"drains": self._drains} if self._drains else {}
            self._folder.write_state({"pid": os.getpid(), **self._facts, **drains, "children": children})
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


async def _waits_for(child: Child) -> str:
    count = None if child.spec.in_flight is None else await child.spec.in_flight()
    if count is None:
        return child.spec.name
    return f"{count} request{'' if count == 1 else 's'} in flight"
