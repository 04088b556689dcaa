"""Inputs that workers gave of an operation: those that an order's workload names, and those that stand for its pool."""

import logging
from dataclasses import dataclass, field

from pydantic import ValidationError

from polymorph.bus import topology
from polymorph.bus.errors import BusError, Corrupt, NotFound, TooLarge
from polymorph.bus.port import Bus
from polymorph.evaluator.adapters.captures import MOST_BYTES, BadInputs, read
from polymorph.evaluator.domain.captured import TRIED, Captured
from polymorph.evaluator.domain.operation import Operation, UnknownOperation, operation
from polymorph.events.types import EvaluateCandidate
from polymorph.kernels.schema import CapturedFile, Workload
from polymorph.workloads import shelf

_log = logging.getLogger(__name__)
_WORKLOADS = 3
_WORKLOAD_BYTES = 1 << 20
_MOST_IN_ALL = 64 << 20


@dataclass(slots=True)
class Given:
    """Calls that can be measured on, the workloads that they are of, and what was left out with the reason."""

    calls: list[Captured] = field(default_factory=list)
    workloads: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    bytes: int = 0


class LiveInputs:
    """Reads them from the bus. They derive from users' text: they are held for one evaluation and kept nowhere."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def of(self, order: EvaluateCandidate, workload: Workload) -> Given:
        """What there is for the order.

        Raises:
            BadInputs: the order's own workload names inputs that cannot be read. Those of the pool that cannot are left
            out: nobody asked for them by name.
        """
        given = Given()
        try:
            op = operation(order.definition)
        except UnknownOperation:
            return given  # the gates say so
        if named(workload):
            await self._take(given, order.workload, workload, op, order)
            return given
        for digest in await self._standing(order, given):
            try:
                await self._take(given, digest, await self._document(digest), op, order)
            except BadInputs as error:
                _log.warning("captured workload %s is left out: %s", digest, error)
                given.left_out[digest] = str(error)
        return given

    async def _standing(self, order: EvaluateCandidate, given: Given) -> list[str]:
        try:
            found = await shelf.standing(self._bus, pool=order.pool, definition=order.definition)
        except BusError as error:
            _log.warning("what was captured for pool %s cannot be listed: %s", order.pool, error)
            given.left_out["pool"] = str(error)
            return []
        meets = [each for each in found if any(m >= order.min_m for m in each.m)]
        return [each.workload for each in meets[:_WORKLOADS]]

    async def _document(self, digest: str) -> Workload:
        raw = await self._object(digest, _WORKLOAD_BYTES, topology.CAPTURES)
        try:
            return Workload.model_validate_json(raw)
        except ValidationError as error:
            raise BadInputs(f"{digest} is no workload: {error.errors()[0]['msg']}") from error

    async def _take(
        self, given: Given, digest: str, workload: Workload, op: Operation, order: EvaluateCandidate
    ) -> None:
        captured = workload.x_polymorph.privacy == "captured"
        store = topology.CAPTURES if captured else topology.ARTIFACTS
        calls = []
        for file in fitting(named(workload), order.min_m, order.max_m)[: TRIED - len(given.calls)]:
            at_most = min(MOST_BYTES, _MOST_IN_ALL - given.bytes)
            content = await self._object(file.path, at_most, store)
            given.bytes += len(content)
            try:
                values = read(content, op)
            except BadInputs as error:
                raise BadInputs(f"inputs {file.path[:12]}: {error}") from error
            calls.append(Captured(values, "captured" if captured else "own-engine"))
        if calls:
            given.calls += calls
            given.workloads.append(digest)

    async def _object(self, digest: str, at_most: int, store: str) -> bytes:
        try:
            return await self._bus.get_object(digest, store=store, at_most=at_most)
        except NotFound as error:
            raise BadInputs(
                f"{digest[:12]} is not in store {store}: it has expired, or was never there"
            ) from error
        except (TooLarge, Corrupt, ValueError) as error:
            raise BadInputs(str(error)) from error


def named(workload: Workload) -> tuple[CapturedFile, ...]:
    """The files of inputs that a workload names; a workload of other makers names one, by its inputs alone."""
    if workload.x_polymorph.captures:
        return workload.x_polymorph.captures
    paths = [
        str(each["path"])
        for each in workload.inputs.values()
        if each.get("type") == "safetensors" and "path" in each
    ]
    return tuple(CapturedFile(m=workload.axes.get("M", 1), path=path) for path in dict.fromkeys(paths))


def fitting(files: tuple[CapturedFile, ...], min_m: int, max_m: int) -> list[CapturedFile]:
    """Those with enough rows, the latest first: such as are within the range before those that are to be cut."""
    enough = [file for file in reversed(files) if file.m >= min_m]
    return sorted(enough, key=lambda file: file.m > max_m)
