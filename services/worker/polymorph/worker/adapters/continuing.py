"""vLLM's AsyncLLM whose requests outlive its engine: they go on in a successor, and their callers see one answer.

The front keeps of each request what its caller sees: detokenizer, log probabilities, counts, and the queue that the
caller reads from. All of it moves to the successor as it is; what the successor's engine computes is the rest of the
tokens, from a prompt that ends in those that were there. So nothing changes on the usual path, every kind of output
goes on, and a stop string may lie across the seam.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestState

from polymorph.engine.loading.rows import SELF_PREFIX
from polymorph.worker.adapters.interrupted import (
    died_again,
    families,
    forget_draws,
    interrupted,
    keep_first_times,
    parent_id,
    remember,
    rest,
)
from polymorph.worker.domain.continuation import Continue, End, continuation

_log = logging.getLogger(__name__)


class CannotContinue(GracefulHTTPError):  # type: ignore[misc]
    """Ends one request: with an error event where it streams, with 503 where nothing was sent."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The engine died and this request cannot go on: {reason}.", HTTPStatus.SERVICE_UNAVAILABLE
        )


class ContinuingLLM(AsyncLLM):  # type: ignore[misc]
    """With `recovers`, its requests wait at its death for `succeed` or `give_up`; later ones are passed on."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.recovers = False
        self.seeds_resume = False
        """Whether the engine can bring a seeded request's generator to where another had it."""
        self.numerics: str | None = None
        """Of the lossy revision that it runs; None where outputs are as without any."""
        self.on_death: Callable[[], None] = _nothing
        """Called in the event loop when the engine is found dead."""
        self.on_outcome: Callable[[bool], None] = _nothing
        """Called with whether an interrupted request goes on."""
        self._orphans: dict[str, RequestState] = {}
        self._heir: ContinuingLLM | None = None
        self._followers: list[ContinuingLLM] = []
        """Whose requests came when this engine was dead as well, and go on where its own do."""
        self._given_up: str | None = None
        self._passing: asyncio.Task[None] | None = None
        self._decided = asyncio.Event()
        self._hook()

    def _hook(self) -> None:
        processor = self.output_processor
        add = processor.add_request

        def add_request(request: EngineCoreRequest, *arguments: Any, **named: Any) -> None:
            forget_draws(request)
            add(request, *arguments, **named)
            remember(processor.request_states.get(request.request_id), request)

        processor.add_request = add_request
        processor.propagate_error = self._died

    # --- what vLLM's serving layer asks ---

    @property
    def dead(self) -> bool:
        """Whether this engine itself is gone."""
        return bool(super().errored)

    @property
    def errored(self) -> bool:
        """Whether a request that comes here now is lost: it is not while a successor is there or on its way."""
        return self.dead and (self._given_up is not None or not self.recovers)

    @property
    def _unread(self) -> bool:
        """Whether nobody reads its engine's answers any more: `_died` was called, and is not called again."""
        return self.output_handler is not None and self.output_handler.done()

    async def add_request(self, request_id: str, *arguments: Any, **named: Any) -> Any:
        try:
            if not self.dead:
                return await super().add_request(request_id, *arguments, **named)
        except EngineDeadError:
            if not self.recovers:
                raise
        heir = await self._inheritor(request_id)
        return await heir.add_request(request_id, *arguments, **named)

    async def _add_request(self, request: EngineCoreRequest, *arguments: Any, **named: Any) -> None:
        try:
            await super()._add_request(request, *arguments, **named)
        except EngineDeadError:
            if not self.recovers:
                raise
            # It is among the states, and waits with the others; those that come after their removal follow them.
            if self._unread:
                self._orphan()
            if self._heir is not None:
                await self.succeed(self._heir)
            elif self._given_up is not None:
                raise

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await super().abort(ids, internal)
        if self.dead:
            self._disown(ids, internal=internal)
        if self._heir is not None:
            await self._heir.abort(ids, internal)

    # --- what the worker does ---

    def listen(self) -> None:
        """Reads answers from now on, also where no request has come yet: so its end is noticed."""
        self._run_output_handler()

    async def succeed(self, heir: "ContinuingLLM") -> None:
        """Interrupted requests go on in `heir`, and so does whatever comes here later; where `heir` is dead as well,
        in its successor.
        """
        self._heir = heir
        self._decided.set()
        followers, self._followers = self._followers, []
        for follower in followers:
            await follower.succeed(heir)
        for family in families(list(self._orphans.values())):
            if heir._unread:  # noqa: SLF001
                await heir._lead(self)  # noqa: SLF001
                return
            # Its client may leave while others are handed over.
            left = [state for state in family if self._orphans.pop(state.request_id, None) is not None]
            if left:
                await self._continue(left, heir)

    def give_up(self, reason: str) -> None:
        """There will be no successor: interrupted requests end with an error."""
        self._given_up = reason
        self._decided.set()
        followers, self._followers = self._followers, []
        for follower in followers:
            follower.give_up(reason)
        orphans, self._orphans = self._orphans, {}
        for family in families(list(orphans.values())):
            self._end(family, reason)

    async def _lead(self, follower: "ContinuingLLM") -> None:
        """The engine here is dead, and runs nothing of another's: `follower` goes where this one goes."""
        if self._heir is not None:
            await follower.succeed(self._heir)
        elif self._given_up is not None:
            follower.give_up(self._given_up)
        else:
            _log.warning("the successor died as well: what it was to take waits for the next")
            self._followers.append(follower)

    def _died(self, error: Exception) -> None:
        """In place of vLLM's `propagate_error`: the last thing that its output handler does."""
        if self.recovers and self._given_up is None:
            self._orphan()
            if self._heir is not None:  # which was there before the death was seen here
                self._passing = asyncio.get_running_loop().create_task(self.succeed(self._heir))
        else:
            for state in self.output_processor.request_states.values():
                state.queue.put(error)
        self._fail_calls()
        self.on_death()

    def _fail_calls(self) -> None:
        """VLLM lets a call of a dead engine wait for ever."""
        for answer in getattr(self.engine_core, "utility_results", {}).values():
            if not answer.done():
                answer.set_exception(EngineDeadError())
                answer.exception()  # whoever waits is told; nobody may

    def _orphan(self) -> None:
        processor = self.output_processor
        for own, state in processor.request_states.items():
            if state.external_req_id.startswith(SELF_PREFIX):
                # The worker asked it of this engine: another one's answer says nothing.
                state.queue.put(EngineDeadError())
            else:
                self._orphans[own] = state
        for known in (processor.request_states, processor.external_req_ids, processor.parent_requests):
            known.clear()

    async def _inheritor(self, request_id: str) -> "ContinuingLLM":
        if self.recovers and not request_id.startswith(SELF_PREFIX):
            await self._decided.wait()
            if self._heir is not None:
                return self._heir
        raise EngineDeadError

    def _disown(self, ids: list[str], *, internal: bool) -> None:
        """Its client left while there was no engine."""
        for own, state in list(self._orphans.items()):
            names = {own, parent_id(state)} if internal else {state.external_req_id}
            if not names.isdisjoint(ids):
                del self._orphans[own]

    async def _continue(self, family: list[RequestState], heir: "ContinuingLLM") -> None:
        """All sequences of one request, or none."""
        try:
            plans = self._plans(family, heir)
            reason = next((plan.reason for plan in plans if isinstance(plan, End)), None)
            if reason is not None:
                self._end(family, reason)
                return
            self.on_outcome(True)
            await heir._adopt(family, [plan for plan in plans if isinstance(plan, Continue)])  # noqa: SLF001
        except EngineDeadError:
            # Answers were read there when it took them: `_died` finds them among the states.
            _log.warning("the successor died as well: what was handed over waits for the next")
        except Exception as error:  # noqa: BLE001 - of one request: the others are still to be handed over
            _log.exception("request %s cannot be handed over", family[0].external_req_id)
            self._end(family, f"{type(error).__name__}: {error}")

    def _plans(self, family: list[RequestState], heir: "ContinuingLLM") -> list[Continue | End]:
        found = [interrupted(state, heir.model_config, heir.seeds_resume) for state in family]
        same = self.numerics == heir.numerics
        return [continuation(dataclasses.replace(each, other_numerics=not same)) for each in found]

    async def _adopt(self, family: list[RequestState], plans: list[Continue]) -> None:
        requests = [rest(state, plan) for state, plan in zip(family, plans, strict=True)]
        processor = self.output_processor
        for state in family:
            died_again(state)
            keep_first_times(state)
            processor.request_states[state.request_id] = state
            processor.external_req_ids[state.external_req_id].append(state.request_id)
            if state.parent_req is not None:
                processor.parent_requests[state.parent_req.request_id] = state.parent_req
        self._run_output_handler()
        for request in requests:
            await self.engine_core.add_request_async(request)

    def _end(self, family: list[RequestState], reason: str) -> None:
        self.on_outcome(False)
        error = CannotContinue(reason)
        _log.error("request %s: %s", family[0].external_req_id, error)
        family[0].queue.put(error)


def _nothing(*_: object) -> None:
    """Nobody asked."""
