"""What a search says: proposals, orders, its end, and the winner's way to the promoter."""

from polymorph.compiler.domain import search_report
from polymorph.compiler.domain.promotion.moves import Proposal
from polymorph.compiler.domain.search_state import Candidate, Pending, Result, Search, identifier
from polymorph.events.types import CandidateEvaluated, CandidateProposed, EvaluateCandidate, SearchClosed
from polymorph.events.values import Gate, KernelBinding, Numerics, Verdict
from polymorph.kernels.schema import Solution


def closed(search: Search, outcome: str, reason: str) -> SearchClosed:
    """The fact that a search ended."""
    return SearchClosed.model_validate(
        {
            "pool": search.pool,
            "search_id": search.search_id,
            "outcome": outcome,
            "winner": search.winner if outcome == "promoted" else None,
            "candidates": len(search.candidates),
            "cpu_s": search.cpu_s(),
            "reason": reason,
        }
    )


def proposal_of(search: Search) -> Proposal:
    """The confirmed winner of a search as the promoter takes it."""
    promotion_id = search.promotion_id()
    if search.winner is None or promotion_id is None:
        raise ValueError(f"search {search.search_id} has no winner to promote")
    candidate = search.candidate(search.winner)
    event = next(e for e in reversed(candidate.confirmations) if promotable(e))
    binding = KernelBinding(
        definition=search.target.definition,
        min_m=search.target.min_m,
        max_m=search.target.max_m,
        manifest=event.manifest or "",
        artifact=event.artifact or "",
        numerics=event.numerics or Numerics.REORDERED,
    )
    return Proposal(
        promotion_id=promotion_id,
        pool=search.pool,
        bindings=(binding,),
        gate=event.gate,
        speedup=event.speedup,
        drift_id=search.drift_id,
        reason=search_report.won(search, candidate, event),
    )


def promotable(event: CandidateEvaluated) -> bool:
    """Passed, measured as no loss, and signed: without manifest and artifact there is nothing that a worker may load."""
    signed = bool(event.manifest) and bool(event.artifact)
    return event.verdict is Verdict.PASSED and signed and event.speedup is not None and event.speedup.low >= 1


def unanswered(pending: Pending) -> CandidateEvaluated:
    """What stands for an answer that never came."""
    order = pending.order
    return CandidateEvaluated(
        pool=order.pool,
        search_id=order.search_id,
        candidate_id=order.candidate_id,
        evaluation_id=order.evaluation_id,
        gate=order.until,
        verdict=Verdict.INCONCLUSIVE,
        reason=f"no evaluator answered (orders sent: {pending.sends})",
    )


def with_answer(candidate: Candidate, event: CandidateEvaluated, *, confirmation: bool) -> Candidate:
    if not confirmation:
        return candidate.model_copy(update={"look": event})
    if event.verdict is Verdict.PASSED and not promotable(event):
        reason = f"it passed at {search_report.ratio(event.speedup)} without what a promotion needs"
        event = event.model_copy(update={"verdict": Verdict.FAILED, "reason": reason})
    return candidate.model_copy(update={"confirmations": (*candidate.confirmations, event)})


def candidate_of(search: Search, solution: Solution, turn: int) -> Candidate:
    about = solution.x_polymorph
    digest = solution.digest()
    return Candidate(
        candidate_id=identifier("candidate", search.search_id, digest),
        solution=digest,
        name=solution.name,
        parent=about.parent,
        proposer=about.proposer,
        pattern=about.pattern,
        params=about.params,
        turn=turn,
    )


def result_of(candidate: Candidate) -> Result:
    if candidate.look is None:
        raise ValueError(f"candidate {candidate.candidate_id} has no result yet")
    look = candidate.look
    return Result(
        solution=candidate.solution,
        params=candidate.params,
        verdict=look.verdict,
        gate=look.gate,
        speedup=look.speedup,
        reason=look.reason,
    )


def proposed(search: Search, candidate: Candidate) -> CandidateProposed:
    return CandidateProposed(
        pool=search.pool,
        search_id=search.search_id,
        candidate_id=candidate.candidate_id,
        definition=search.target.definition,
        solution=candidate.solution,
        parent=candidate.parent,
        proposer=candidate.proposer,
        pattern=candidate.pattern,
        params=candidate.params,
    )


def order(search: Search, candidate: Candidate, until: Gate, *, seed: int) -> EvaluateCandidate:
    return EvaluateCandidate(
        pool=search.pool,
        search_id=search.search_id,
        candidate_id=candidate.candidate_id,
        evaluation_id=identifier(
            "evaluation", candidate.candidate_id, until, len(candidate.confirmations) if seed else 0
        ),
        hardware=search.hardware,
        definition=search.target.definition,
        solution=candidate.solution,
        workload=search.workload,
        incumbent=search.incumbent,
        until=until,
        min_m=search.target.min_m,
        max_m=search.target.max_m,
        confirm_seed=seed,
    )
