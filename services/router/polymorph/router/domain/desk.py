"""The placement desk: answers a request at once, holds it where all workers are full, and settles the line."""

from dataclasses import dataclass

from polymorph.events.requests import Held, Placed, PlaceRequest, Unplaceable
from polymorph.events.state import WorkerRecord
from polymorph.router.domain.accounts import Accounts
from polymorph.router.domain.fleet import Fleet
from polymorph.router.domain.line import Line
from polymorph.router.domain.policy import Candidate, eligible, pick
from polymorph.router.domain.programs import Program, Programs

_IDLE_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class DeskRules:
    """Capacities as shares of what workers report; times in seconds."""

    tokens_factor: float = 1.0
    seqs_factor: float = 1.5
    default_output_tokens: int = 256
    hold_deadline_s: float = 60.0
    hold_heartbeat_s: float = 1.0
    hold_limit: int = 1024
    sticky_margin_tokens: int = 2048


Final = Placed | Unplaceable


class Desk:
    """Pure: the time comes with each call, answers are returned and sent by the caller."""

    def __init__(self, rules: DeskRules, fleet: Fleet, accounts: Accounts, programs: Programs) -> None:
        self._rules = rules
        self._fleet = fleet
        self._accounts = accounts
        self._programs = programs
        self._line = Line()

    def arrive(self, request: PlaceRequest, now: float) -> Final | Held:
        """The first answer. Who waits already goes first."""
        self._line.leave(request.placement_id)
        if not self._line.length(request.pool):
            answer = self._place(request, now)
            if answer is not None:
                return answer
        if self._line.length(request.pool) >= self._rules.hold_limit:
            return Unplaceable(
                reason=f"{self._rules.hold_limit} requests wait already", retry_after_s=self._retry_after_s
            )
        self._line.join(request, now + self._rules.hold_deadline_s)
        return self._held(now + self._rules.hold_deadline_s, now)

    def settle(self, now: float) -> list[tuple[str, Final]]:
        """Places whoever fits by now, first come first served, and turns away whoever waited too long."""
        answers: list[tuple[str, Final]] = []
        for pool in self._line.pools():
            for waiting in self._line.waiting(pool):
                answer = self._place(waiting.request, now)
                if answer is None:
                    break
                self._line.leave(waiting.request.placement_id)
                answers.append((waiting.request.placement_id, answer))
        for late in self._line.overdue(now):
            reason = f"all workers stayed full for {self._rules.hold_deadline_s:g} s"
            turned_away = Unplaceable(reason=reason, retry_after_s=self._retry_after_s)
            answers.append((late.request.placement_id, turned_away))
        return answers

    def beats(self, now: float) -> list[tuple[str, Held]]:
        """A sign of life for everyone in line."""
        return [
            (waiting.request.placement_id, self._held(waiting.deadline, now))
            for pool in self._line.pools()
            for waiting in self._line.waiting(pool)
        ]

    def _held(self, deadline: float, now: float) -> Held:
        return Held(
            reason="all workers are full",
            deadline_s=max(0.0, deadline - now),
            heartbeat_s=self._rules.hold_heartbeat_s,
        )

    def started(self, placement_id: str, worker_id: str, now: float) -> None:
        """Somebody sent a request to a worker, perhaps without us."""
        self._accounts.seen(placement_id, worker_id, now)

    def served_elsewhere(self, pool: str, program_id: str, worker_id: str, now: float) -> None:
        """Somebody sent a request of this program to a worker without us: its prefix is there now."""
        self._programs.heard(Program.named(pool, program_id), worker_id, now)

    def finished(self, placement_id: str) -> bool:
        """A request ended, or its client left; whether that may have made room."""
        waited = self._line.leave(placement_id)
        return self._accounts.release(placement_id) or waited

    def worker_seen(self, record: WorkerRecord, now: float) -> None:
        """A heartbeat. A worker that reports itself idle clears what we still count for it from long ago."""
        self._fleet.put(record, now)
        if not record.running and not record.waiting:
            self._accounts.settle_idle(record.worker_id, now - _IDLE_GRACE_S)

    def worker_gone(self, worker_id: str) -> None:
        self._fleet.remove(worker_id)
        self._accounts.forget_worker(worker_id)

    def tick(self, now: float) -> None:
        """Lets time do its work: silent workers and forgotten reservations go."""
        for worker_id in self._fleet.expire(now):
            self._accounts.forget_worker(worker_id)
        self._accounts.expire(now)

    @property
    def _retry_after_s(self) -> float:
        return max(1.0, self._rules.hold_heartbeat_s)

    def _place(self, request: PlaceRequest, now: float) -> Final | None:
        """None: wait."""
        candidates = eligible(map(self._candidate, self._fleet.takers(request.pool)), request.exclude)
        if not candidates:
            reason = f"no ready worker in pool {request.pool}"
            if request.exclude:
                reason += f" but {', '.join(request.exclude)}, which just failed"
            return Unplaceable(reason=reason, retry_after_s=self._retry_after_s, cause="no-worker")
        demand, margin = self._demand(request), self._rules.sticky_margin_tokens
        program = Program.named(request.pool, request.program_id) if request.program_id and margin else None
        home = self._programs.home(program, now) if program else None
        chosen = pick(candidates, demand, request.placement_id, home=home, margin=margin)
        if chosen is None:
            return None
        self._accounts.reserve(request.placement_id, chosen.worker_id, demand, now)
        if program:
            self._programs.served(program, chosen.worker_id, now)
        return Placed(worker_id=chosen.worker_id, url=chosen.url)

    def _demand(self, request: PlaceRequest) -> int:
        output = request.max_tokens or self._rules.default_output_tokens
        return request.prompt_tokens_estimate + min(output, 4 * self._rules.default_output_tokens)

    def _candidate(self, record: WorkerRecord) -> Candidate:
        load = self._accounts.load(record.worker_id)
        return Candidate(
            worker_id=record.worker_id,
            url=record.url,
            tokens=load.tokens,
            requests=load.requests,
            capacity_tokens=int(record.kv_capacity_tokens * self._rules.tokens_factor),
            capacity_requests=int(record.max_num_seqs * self._rules.seqs_factor),
        )
