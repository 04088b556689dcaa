"""Switches the worker's slots between its revision and empty, for the paired measurement."""

from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from polymorph.bus.credentials import Credentials
from polymorph.bus.nats.bus import NatsBus
from polymorph.config.clock import SystemClock
from polymorph.embedded.folder import DataFolder
from polymorph.embedded.secrets import CREDENTIALS
from polymorph.events.requests import ControlAnswer, ControlSlots

_TTL_S = 300.0
_REVISIONS: dict[str, Literal["stable", "empty"]] = {"tuned": "stable", "empty": "empty"}


class SlotSwitch:
    """`await switch("empty")` and `await switch("tuned")`; what was switched goes back by itself after some minutes."""

    def __init__(self, data: Path, nats_url: str, worker_id: str) -> None:
        self._settings = Credentials.load(DataFolder(data).keys / CREDENTIALS).nats_settings(
            "compiler", nats_url
        )
        self._worker_id = worker_id
        self._bus: NatsBus | None = None

    async def __aenter__(self) -> Self:
        self._bus = await NatsBus.connect(self._settings, source="/polymorph/demo", clock=SystemClock())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bus is not None:
            await self._bus.close()

    async def __call__(self, arm: str) -> None:
        if self._bus is None:
            raise RuntimeError("use SlotSwitch in an `async with`")
        request = ControlSlots(worker_id=self._worker_id, revision=_REVISIONS[arm], ttl_s=_TTL_S)
        answer = ControlAnswer.model_validate_json(await self._bus.request(request, timeout_s=30.0))
        if not answer.ok:
            raise RuntimeError(f"the worker would not switch to {arm}: {answer.reason}")
