"""The scheduler's process of one engine: its settings read and set between two steps, and the salt of its cache."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from polymorph.bus.errors import Retryable
from polymorph.engine.core import SALT_CALL, SET_CALL, SETTINGS_CALL
from polymorph.engine.loading.admission import Refused
from polymorph.engine.loading.answering import answered

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class InForce:
    """Read from inside the engine. `missing` says why a setting cannot be set in this vLLM."""

    settings: Mapping[str, Any]
    envelope: Mapping[str, int]
    missing: Mapping[str, str]
    config: Mapping[str, Any]
    step: int
    seconds: float = 0.0
    salt: str | None = None

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        return cls(
            settings=document["settings"],
            envelope=document["envelope"],
            missing=document["missing"],
            config=document["config"],
            step=document["step"] or 0,
            seconds=document.get("seconds", 0.0),
            salt=document["salt"],
        )


class Scheduler:
    """Calls run between two steps."""

    def __init__(self, llm: Any, dead: type[Exception]) -> None:
        self._llm = llm
        self._dead = dead
        self.seqs: int | None = None
        """Sequences that run at the same time, as read last."""
        self._known: InForce | None = None

    async def read(self) -> InForce:
        """Raises `Refused` where this engine was started without our calls."""
        return self._noted(await self._call(SETTINGS_CALL))

    async def known(self) -> InForce:
        """As read last, or read now: nobody but `set` changes settings, and each call costs the step that it meets.

        Raises:
            Refused: as `read`.
        """
        return self._known or await self.read()

    async def set(self, changes: Mapping[str, Any]) -> InForce:
        """Sets all of `changes` or, raising `Refused`, none."""
        try:
            return self._noted(await self._checked(SET_CALL, dict(changes)))
        except BaseException:
            self._known = None  # without an answer, it may have set them or not
            raise

    async def salt(self, revision: str | None) -> None:
        """From now on no request reads prefix cache that was written under another revision."""
        await self._checked(SALT_CALL, revision)
        self._llm.numerics = revision

    def _noted(self, document: Mapping[str, Any]) -> InForce:
        self._known = force = InForce.of(document)
        self.seqs = force.settings.get("max_num_seqs")
        return force

    async def _checked(self, name: str, argument: Any) -> dict[str, Any]:
        answer = await self._call(name, argument)
        if not answer["ok"]:
            raise Refused(answer["reason"])
        return answer

    async def _call(self, name: str, *arguments: Any) -> dict[str, Any]:
        try:
            return await answered(self._asked(name, *arguments), self._dead, name)
        except Retryable as error:
            if f"has no attribute '{name}'" not in str(error):
                raise
            raise Refused(f"{name}: {error}; is the plugin of Polymorph loaded in the engine?") from error

    async def _asked(self, name: str, *arguments: Any) -> dict[str, Any]:
        async with asyncio.timeout(_TIMEOUT_S):
            answer: dict[str, Any] = await self._llm.engine_core.call_utility_async(name, *arguments)
        return answer
