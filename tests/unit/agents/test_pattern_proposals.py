"""What the pattern agent proposes, and how it goes on from results."""

from random import Random
from typing import Any

import pytest

from polymorph.compiler.domain.agents.choices import changes, from_text, recombined
from polymorph.compiler.domain.agents.linear import LinearPattern, LinearVocabulary
from polymorph.compiler.domain.agents.proposer import PatternProposer, propose_for, vocabulary_for
from polymorph.compiler.domain.agents.sources import normalised_digest
from polymorph.compiler.domain.search_state import Result
from polymorph.events.values import Gate, Ratio, Verdict
from polymorph.kernels.definitions import (
    fused_add_rms_norm_definition,
    linear_definition,
    rms_norm_definition,
)
from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import Solution

LINEAR = linear_definition(576, 576, "float32")


def agent(max_m: int = 8, isa: Isa = Isa.AVX2, **options: Any) -> PatternProposer[Any]:
    made = propose_for(LINEAR, 1, max_m, isa, rng=Random(3), **options)
    assert made is not None
    return made


def judged(solution: Solution, speedup: float) -> Result:
    ratio = Ratio(point=speedup, low=speedup - 0.01, high=speedup + 0.01)
    return Result(
        solution=solution.digest(),
        params=solution.x_polymorph.params,
        verdict=Verdict.PASSED,
        gate=Gate.G3_MICRO,
        speedup=ratio,
        reason="",
    )


def failed(solution: Solution) -> Result:
    return Result(
        solution=solution.digest(),
        params=solution.x_polymorph.params,
        verdict=Verdict.FAILED,
        gate=Gate.G1_BUILD,
        speedup=None,
        reason="does not compile",
    )


def differing(one: dict[str, str], other: dict[str, str]) -> int:
    return sum(one[name] != other[name] for name in one)


def test_the_first_round_varies_one_thing_each() -> None:
    base, *rest = agent().next([])
    assert rest
    changed = set()
    for solution in rest:
        before, after = base.x_polymorph.params, solution.x_polymorph.params
        assert differing(before, after) == 1
        assert solution.x_polymorph.parent == base.digest()
        changed |= {name for name in before if before[name] != after[name]}
    assert len(changed) == len(rest), "each varies another thing"


def test_the_next_round_joins_what_helped() -> None:
    proposer = agent(batch=9)
    first = proposer.next([])
    base = first[0].x_polymorph.params
    results = [judged(first[0], 1.0)]
    helped = {"storage", "unroll"}
    for solution in first[1:]:
        changed = {n for n in base if base[n] != solution.x_polymorph.params[n]}
        results.append(judged(solution, 1.2 if changed <= helped else 0.9))
    joined = proposer.next(results)[0].x_polymorph.params
    best = [s.x_polymorph.params for s in first if differing(base, s.x_polymorph.params)]
    wanted = {n: p[n] for n in helped for p in best if p[n] != base[n]}
    assert {name: joined[name] for name in helped} == wanted
    assert differing(base, joined) == 2


def test_nothing_is_proposed_twice_and_the_search_ends() -> None:
    proposer = agent(max_m=1, batch=64)
    seen: set[str] = set()
    results: list[Result] = []
    for _ in range(100):
        proposed = proposer.next(results)
        if not proposed:
            break
        digests = {normalised_digest(s) for s in proposed}
        assert len(digests) == len(proposed)
        assert not digests & seen
        seen |= digests
        results += [judged(s, 2.0 - len(seen) / 1e3) for s in proposed]
    else:
        pytest.fail("it never ends")


def test_failures_are_left_behind() -> None:
    proposer = agent()
    first = proposer.next([])
    second = proposer.next([failed(s) for s in first])
    assert second
    assert not {s.digest() for s in first} & {s.digest() for s in second}


def test_made_anew_it_proposes_the_same_again() -> None:
    one, two = agent(), agent()
    first = one.next([])
    results = [judged(s, 1 + i / 10) for i, s in enumerate(first)]
    later = one.next(results)
    assert [s.digest() for s in two.next([])] == [s.digest() for s in first]
    assert [s.digest() for s in two.next(results)] == [s.digest() for s in later]


def test_seeds_come_first() -> None:
    seed = LinearPattern(isa=Isa.AVX2, panel=24, rows=4, storage="bfloat16").params()
    assert agent(seeds=[{"other": "thing"}, seed]).next([])[0].x_polymorph.params == seed


def test_a_seed_for_more_rows_is_fitted() -> None:
    seed = LinearPattern(isa=Isa.AVX2, panel=16, rows=6).params()
    fitted = agent(max_m=4, seeds=[seed]).next([])[0].x_polymorph.params
    assert fitted["rows"] == "4"


@pytest.mark.parametrize("isa", list(Isa))
@pytest.mark.parametrize("max_m", [1, 2, 8, 32, 512])
@pytest.mark.parametrize(
    "definition",
    [
        LINEAR,
        linear_definition(960, 577, "bfloat16"),
        rms_norm_definition(576, "float32"),
        fused_add_rms_norm_definition(576, "bfloat16"),
    ],
    ids=lambda d: d.name,
)
def test_every_machine_gets_proposals_that_it_runs(definition: Any, max_m: int, isa: Isa) -> None:
    proposer = propose_for(definition, 1, max_m, isa, rng=Random(1))
    assert proposer is not None
    proposed = proposer.next([])
    assert proposed
    for solution in proposed:
        assert isa.runs(Isa[solution.x_polymorph.isa])
        assert (solution.x_polymorph.min_m, solution.x_polymorph.max_m) == (1, max_m)
        assert solution.sources


def test_an_operation_without_patterns_has_no_agent() -> None:
    attention = LINEAR.model_copy(update={"op_type": "gqa_paged"})
    assert propose_for(attention, 1, 8, Isa.AVX2, rng=Random(1)) is None


def test_register_blocks_fit_the_registers() -> None:
    vocabulary = LinearVocabulary(LINEAR, 32, Isa.AVX2)
    assert vocabulary.canonical(LinearPattern(isa=Isa.AVX2, panel=16, rows=6)) is not None
    assert vocabulary.canonical(LinearPattern(isa=Isa.AVX2, panel=16, rows=8)) is None
    assert vocabulary.canonical(LinearPattern(isa=Isa.AVX512, panel=16, rows=8)) is None


def test_comments_and_spaces_make_no_new_source() -> None:
    solution = agent().next([])[0]
    layout, kernel = solution.sources
    spaced = kernel.model_copy(update={"content": "// new\n" + kernel.content.replace("\n", "\n\n ")})
    assert normalised_digest(solution.model_copy(update={"sources": (spaced, layout)})) == normalised_digest(
        solution
    )


def test_choices_survive_as_text() -> None:
    pattern = LinearPattern(isa=Isa.AVX512_BF16, engine="dot", pack_x=True, unroll=8)
    assert from_text(LinearPattern, pattern.params()) == pattern
    assert from_text(LinearPattern, pattern.params() | {"rows": "many"}) is None
    assert from_text(LinearPattern, {}) is None


def test_recombination_takes_changes_from_both() -> None:
    base = LinearPattern(isa=Isa.AVX2)
    wide, deep = (next(changes(base, {name: (8,)})) for name in ("panel", "unroll"))
    both = recombined(base, wide, deep)
    assert (both.panel, both.unroll) == (8, 8)


def test_a_vocabulary_refuses_no_tokens() -> None:
    with pytest.raises(ValueError, match="max_m is 0"):
        vocabulary_for(LINEAR, 0, Isa.AVX2)
