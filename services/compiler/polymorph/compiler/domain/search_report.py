"""What a search says about itself, in plain sentences."""

from polymorph.compiler.domain.search_state import Candidate, Search
from polymorph.compiler.domain.search_target import Target
from polymorph.events.types import CandidateEvaluated
from polymorph.events.values import Ratio, Verdict

NEAREST = 3


def opened(target: Target, candidates: int, known: int) -> str:
    """Why a search began."""
    start = f", starting from {known} parameter sets that won elsewhere" if known else ""
    return (
        f"{target.definition} takes {target.share:.0%} of the step time{_profile(target)}, and calls of "
        f"{target.min_m} to {target.max_m} tokens take {target.span_weight:.0%} of it: up to {target.gain:.1%} may be "
        f"won, which pays for {candidates} candidates{start}."
    )


def _profile(target: Target) -> str:
    """What the share was measured by, where steps were profiled."""
    seen = target.profiled
    if seen is None:
        return ""
    return (
        f" (in {seen.sampled_steps} profiled steps slot {seen.slot} takes {seen.slot_share:.0%}, all slots together "
        f"{seen.reachable:.0%})"
    )


def won(search: Search, candidate: Candidate, event: CandidateEvaluated) -> str:
    """Why a candidate is promoted."""
    return (
        f"{candidate.name} is the best of {len(search.candidates)} for {search.target.definition} at "
        f"{search.target.min_m} to {search.target.max_m} tokens: {ratio(event.speedup)} when confirmed on fresh "
        f"seeds and end to end."
    )


def nothing_better(search: Search, margin: float) -> str:
    """Why a search ends without a winner: the nearest candidates and why each lost."""
    if not search.candidates:
        return f"Nothing was proposed for {search.target.definition}: {search.stopped}."
    nearest = sorted(search.candidates, key=_distance)[:NEAREST]
    lines = "; ".join(f"{c.name}: {_lost(c, margin)}" for c in nearest)
    return f"None of {len(search.candidates)} candidates is better, and {search.stopped}. Nearest: {lines}."


def ratio(value: Ratio | None) -> str:
    """A measured ratio as people read it."""
    if value is None:
        return "no measured ratio"
    return f"{value.point:.3f}x ({value.low:.3f} to {value.high:.3f})"


def _distance(candidate: Candidate) -> tuple[float, str]:
    """Those that came closest first: by lower bound; without a measurement by how far through the gates."""
    look = candidate.look
    if look is None:
        return 9.0, candidate.candidate_id
    if look.speedup is not None:
        return -look.speedup.low, candidate.candidate_id
    return 2.0 - 0.1 * int(look.gate.value[1:]), candidate.candidate_id


def _lost(candidate: Candidate, margin: float) -> str:
    if candidate.confirmations:
        last = candidate.confirmations[-1]
        return f"{ratio(candidate.look.speedup if candidate.look else None)} at first, but {_sentence(last)}"
    if candidate.look is None:
        return "it was not judged before the budget ended"
    if candidate.look.verdict is Verdict.PASSED:
        return f"{ratio(candidate.look.speedup)}, not certainly above {1 + margin:.2f}x"
    measured = f"{ratio(candidate.look.speedup)}, " if candidate.look.speedup else ""
    return f"{measured}{_sentence(candidate.look)}"


def _sentence(event: CandidateEvaluated) -> str:
    return f"{event.gate} {event.verdict}: {event.reason.rstrip('.')}"
