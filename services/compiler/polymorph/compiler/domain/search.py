"""The state machine of one search: answers and time in, orders and facts out. Nothing here touches the world.

Every call returns the next state and its effects. The effects of a state may be carried out again after a crash:
ids derive from what is remembered, so an order sent twice is one evaluation and a promotion asked twice is one.
"""

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass

from polymorph.compiler.domain import search_report
from polymorph.compiler.domain.search_message import (
    candidate_of,
    closed,
    order,
    promotable,
    proposal_of,
    proposed,
    result_of,
    unanswered,
    with_answer,
)
from polymorph.compiler.domain.search_state import (
    Announce,
    Answer,
    Candidate,
    Effect,
    Keep,
    Order,
    Pending,
    Phase,
    Promote,
    Proposer,
    Proposers,
    Result,
    Search,
)
from polymorph.events.types import CandidateEvaluated
from polymorph.events.values import Gate
from polymorph.kernels.schema import Solution

Step = tuple[Search, list[Effect]]


@dataclass(frozen=True, slots=True)
class Budget:
    """What a search may cost and what counts as better."""

    candidates: int = 24
    seconds: float = 600.0
    in_flight: int = 2
    margin: float = 0.01
    progress: float = 0.002
    confirmations: int = 3
    answer_s: float = 300.0
    longest_answer_s: float = 3600.0
    sends: int = 3


class SearchMachine:
    """Moves a search on. Holds no state of its own."""

    def __init__(self, budget: Budget, proposers: Proposers, fresh_seed: Callable[[], int]) -> None:
        self._budget = budget
        self._proposers = proposers
        self._fresh_seed = fresh_seed

    def begin(self, search: Search, now: dt.datetime) -> Step:
        """The first round of proposals."""
        return self._go_on(search, now)

    def evaluated(self, search: Search, event: CandidateEvaluated, now: dt.datetime) -> Step:
        """An answer came. One that nobody waits for (told twice, or of another search) changes nothing."""
        answered = [p for p in search.pending if p.order.evaluation_id == event.evaluation_id]
        if not answered or search.phase not in (Phase.SEARCHING, Phase.CONFIRMING):
            return search, []
        confirmation = answered[0].order.confirm_seed > 0
        told = tuple(
            with_answer(c, event, confirmation=confirmation) if c.candidate_id == event.candidate_id else c
            for c in search.candidates
        )
        waiting = tuple(p for p in search.pending if p.order.evaluation_id != event.evaluation_id)
        return self._go_on(search.model_copy(update={"candidates": told, "pending": waiting}), now)

    def tick(self, search: Search, now: dt.datetime) -> Step:
        """Sends orders again whose answer is overdue, each time with twice the patience.

        What stays unanswered after the last sending, or once the time to look is spent, counts as inconclusive: no
        search waits for ever.
        """
        effects: list[Effect] = []
        for pending in search.pending:
            if self._given_up(search, pending, now):
                search, more = self.evaluated(search, unanswered(pending), now)
                effects += more
        search, again = self._send_again(search, now)
        return search, [*effects, *again]

    def _send_again(self, search: Search, now: dt.datetime) -> Step:
        late = {p.order.evaluation_id for p in search.pending if now >= self._overdue_at(p)}
        if not late:
            return search, []
        pending = tuple(
            p.model_copy(update={"sent_at": now, "sends": p.sends + 1})
            if p.order.evaluation_id in late
            else p
            for p in search.pending
        )
        again: list[Effect] = [Order(p.order, again=True) for p in pending if p.order.evaluation_id in late]
        return search.model_copy(update={"pending": pending}), again

    def resume(self, search: Search) -> list[Effect]:
        """What a process that starts again must do for what it finds."""
        if search.phase is Phase.PROMOTING:
            return [Promote(proposal_of(search))]
        return [Order(p.order, again=True) for p in search.pending]

    def asked_again(self, search: Search) -> Step:
        """What held the winner may be gone: the promoter is asked once more."""
        if search.phase is not Phase.WAITING:
            return search, []
        search = search.model_copy(update={"phase": Phase.PROMOTING})
        return search, [Promote(proposal_of(search))]

    def promoted(self, search: Search, answer: Answer, reason: str) -> Step:
        """The promoter answered, or told later how a promotion ended."""
        if search.phase not in (Phase.PROMOTING, Phase.WAITING) or answer is Answer.UNDER_WAY:
            return search, []
        if answer is Answer.HELD:
            return search.model_copy(update={"phase": Phase.WAITING}), []
        return _close(search, "promoted" if answer is Answer.LIVE else "failed", reason)

    def cancelled(self, search: Search, reason: str) -> Step:
        """Somebody took the pool's mode back, say. A promotion under way is not cancelled here."""
        if search.phase in (Phase.CLOSED, Phase.PROMOTING):
            return search, []
        return _close(search, "cancelled", reason)

    def _spent(self, search: Search, now: dt.datetime) -> bool:
        return (now - search.opened_at).total_seconds() >= self._budget.seconds

    def _given_up(self, search: Search, pending: Pending, now: dt.datetime) -> bool:
        if search.phase is Phase.SEARCHING and self._spent(search, now):
            return now >= pending.sent_at + dt.timedelta(seconds=self._budget.answer_s)
        return pending.sends >= self._budget.sends and now >= self._overdue_at(pending)

    def _overdue_at(self, pending: Pending) -> dt.datetime:
        patience = self._budget.answer_s * 2 ** (pending.sends - 1)
        return pending.sent_at + dt.timedelta(seconds=min(patience, self._budget.longest_answer_s))

    def _go_on(self, search: Search, now: dt.datetime) -> Step:
        effects: list[Effect] = []
        if search.phase is Phase.SEARCHING:
            search, more = self._look(search, now)
            effects += more
        if search.phase is Phase.CONFIRMING:
            search, more = self._confirm(search, now)
            effects += more
        return search, effects

    def _look(self, search: Search, now: dt.datetime) -> Step:
        """Keeps the evaluator busy until the budget is spent or a round brings nothing."""
        effects: list[Effect] = []
        if self._spent(search, now):
            search = search.model_copy(update={"stopped": f"{self._budget.seconds:g} s were spent"})
        elif not search.queued() and not search.pending:
            search, effects = self._propose(search)
        if not search.stopped:
            search, orders = self._send(search, now)
            effects += orders
        if search.stopped and not search.pending:
            search = search.model_copy(update={"phase": Phase.CONFIRMING})
        return search, effects

    def _propose(self, search: Search) -> Step:
        """Asks the agent for a further round, unless the last one brought nothing better."""
        left = self._budget.candidates - len(search.candidates)
        stopped = (
            f"{len(search.candidates)} candidates were judged"
            if left <= 0
            else ""
            if self._improved(search)
            else "the last round brought nothing better"
        )
        fresh = [] if stopped else self._fresh(search)[:left]
        if not fresh:
            return search.model_copy(update={"stopped": stopped or "the agent had nothing left to try"}), []
        turn = search.turn + 1
        made = tuple(candidate_of(search, solution, turn) for solution in fresh)
        effects: list[Effect] = [Keep(solution.canonical()) for solution in fresh]
        return search.model_copy(update={"turn": turn, "candidates": search.candidates + made}), effects

    def _fresh(self, search: Search) -> list[Solution]:
        """Plays the past rounds to a new agent and takes what it proposes next, known candidates left out."""
        proposer = self._proposers(search)
        proposed: list[Solution] = []
        for turn in range(search.turn + 1):
            told = [result_of(c) for c in search.candidates if c.turn <= turn and c.look is not None]
            proposed = _worth_a_look(proposer, told, search)
        known = {c.solution for c in search.candidates}
        unique = {solution.digest(): solution for solution in proposed}
        return [solution for digest, solution in unique.items() if digest not in known]

    def _improved(self, search: Search) -> bool:
        before = [low for c in search.candidates if c.turn < search.turn and (low := c.low()) is not None]
        last = [low for c in search.candidates if c.turn == search.turn and (low := c.low()) is not None]
        if search.turn < 2:
            return True
        return bool(last) and max(last) > max([*before, 0.0]) + self._budget.progress

    def _send(self, search: Search, now: dt.datetime) -> Step:
        free = self._budget.in_flight - len(search.pending)
        effects: list[Effect] = []
        pending = list(search.pending)
        for candidate in search.queued()[: max(free, 0)]:
            command = order(search, candidate, Gate.G3_MICRO, seed=0)
            pending.append(Pending(order=command, sent_at=now))
            effects += [Announce(proposed(search, candidate)), Order(command)]
        return search.model_copy(update={"pending": tuple(pending)}), effects

    def _confirm(self, search: Search, now: dt.datetime) -> Step:
        """Takes the best through fresh seeds and the end-to-end gate; the next best where it fails."""
        if search.pending:
            return search, []
        ranked = sorted(
            (c for c in search.candidates if (c.low() or 0.0) > 1 + self._budget.margin),
            key=lambda c: (-(c.low() or 0.0), c.candidate_id),
        )
        for candidate in ranked[: self._budget.confirmations]:
            if any(promotable(event) for event in candidate.confirmations):
                return self._win(search, candidate)
            if not candidate.refuted():
                command = order(search, candidate, Gate.G5_END_TO_END, seed=self._fresh_seed())
                pending = (Pending(order=command, sent_at=now),)
                return search.model_copy(update={"pending": pending}), [Order(command)]
        spent = search.stopped.endswith(("spent", "judged"))
        outcome = "budget-spent" if spent and not ranked else "nothing-better"
        return _close(search, outcome, search_report.nothing_better(search, self._budget.margin))

    def _win(self, search: Search, candidate: Candidate) -> Step:
        search = search.model_copy(update={"phase": Phase.PROMOTING, "winner": candidate.candidate_id})
        return search, [Promote(proposal_of(search))]


def _worth_a_look(proposer: Proposer, told: list[Result], search: Search) -> list[Solution]:
    """The next proposals without those that are known to be hopeless."""
    while proposed := proposer.next(told):
        if kept := [s for s in proposed if s.x_polymorph.params not in search.avoid]:
            return kept
    return []


def _close(search: Search, outcome: str, reason: str) -> Step:
    end = closed(search, outcome, reason)
    return search.model_copy(update={"phase": Phase.CLOSED, "pending": ()}), [Announce(end)]
