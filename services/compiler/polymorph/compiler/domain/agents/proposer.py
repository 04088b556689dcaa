"""The pattern agent: varies one thing at a time from a base, then recombines what helped (serial refinement)."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from polymorph.compiler.domain.agents.choices import Choices, recombined
from polymorph.compiler.domain.agents.linear import LinearVocabulary
from polymorph.compiler.domain.agents.norm import NormVocabulary
from polymorph.compiler.domain.agents.sources import normalised_digest
from polymorph.compiler.domain.search_state import Result
from polymorph.events.values import Numerics, Verdict
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import BuildSpec, Definition, Solution, SolutionExtension, SourceFile

NAME = "pattern-agent"
_PATTERNED = ("gemm", "rmsnorm", "fused_add_rmsnorm")
BATCH = 8
PARENTS = 3
"""How many of the best are recombined with each other."""


class Pattern(Choices, Protocol):
    """A point of a vocabulary."""

    @property
    def isa(self) -> Isa: ...

    def params(self) -> dict[str, str]: ...

    def label(self) -> str: ...


P = TypeVar("P", bound=Pattern)


class Vocabulary(Protocol[P]):
    """The patterns of one operation, at some M, on one kind of machine."""

    @property
    def pattern(self) -> str: ...

    @property
    def layout_source(self) -> str | None: ...

    def bases(self) -> Iterator[P]: ...

    def neighbours(self, pattern: P, /) -> Iterator[P]: ...

    def parse(self, params: Mapping[str, str], /) -> P | None: ...

    def canonical(self, pattern: P, /) -> P | None: ...

    def sources(self, pattern: P, /) -> tuple[SourceFile, ...]: ...


class PatternProposer(Generic[P]):
    """Proposes kernels for one operation. Made anew with an equally seeded `rng`, it proposes the same again."""

    def __init__(
        self,
        definition: Definition,
        min_m: int,
        max_m: int,
        vocabulary: Vocabulary[P],
        *,
        rng: random.Random,
        seeds: Sequence[Mapping[str, str]] = (),
        batch: int = BATCH,
    ) -> None:
        self._definition = definition
        self._min_m = min_m
        self._max_m = max_m
        self._vocabulary = vocabulary
        self._rng = rng
        self._batch = batch
        known = (vocabulary.parse(seed) for seed in seeds)
        self._bases = tuple(dict.fromkeys(chain((p for p in known if p is not None), vocabulary.bases())))
        self._seen: set[str] = set()
        self._digests: dict[P, str] = {}

    def next(self, results: Sequence[Result]) -> list[Solution]:
        """The next proposals, none that was proposed before; an empty list where nothing is left to try."""
        ranked = self._ranked(results)
        if ranked:
            wanted = chain(self._children(ranked), *(self._varied(p) for p in ranked[:PARENTS]))
        else:
            wanted = chain(
                ((base, None) for base in self._bases), *(self._varied(base) for base in self._bases)
            )
        return self._fresh(wanted)

    def _ranked(self, results: Sequence[Result]) -> list[P]:
        """What passed, fastest first."""
        scored = [
            (result.speedup.point, pattern)
            for result in results
            if result.verdict is Verdict.PASSED and result.speedup is not None
            if (pattern := self._vocabulary.parse(result.params)) is not None
        ]
        scored.sort(key=lambda item: (-item[0], sorted(item[1].params().items())))
        return [pattern for _, pattern in scored]

    def _children(self, ranked: Sequence[P]) -> Iterator[tuple[P, P | None]]:
        """All helpful changes together, then the best in pairs."""
        base = self._bases[0]
        better = ranked[: ranked.index(base)] if base in ranked else ranked
        merged = ranked[0]
        for pattern in better[1:]:
            fitting = self._vocabulary.canonical(recombined(base, merged, pattern))
            merged = merged if fitting is None else fitting
        yield merged, ranked[0]
        parents = ranked[:PARENTS]
        for first in parents:
            for second in parents:
                child = self._vocabulary.canonical(recombined(base, first, second))
                if child is not None:
                    yield child, first

    def _varied(self, pattern: P) -> Iterator[tuple[P, P | None]]:
        """One change each: first one of every kind of choice, then the others."""
        by_choice: dict[str, list[P]] = {}
        for neighbour in self._vocabulary.neighbours(pattern):
            by_choice.setdefault(_changed(pattern, neighbour), []).append(neighbour)
        for neighbours in by_choice.values():
            self._rng.shuffle(neighbours)
        while any(by_choice.values()):
            for neighbours in by_choice.values():
                if neighbours:
                    yield neighbours.pop(0), pattern

    def _fresh(self, wanted: Iterable[tuple[P, P | None]]) -> list[Solution]:
        chosen: list[Solution] = []
        for pattern, parent in wanted:
            if len(chosen) == self._batch:
                break
            solution = self._solution(pattern, parent)
            digest = normalised_digest(solution)
            if digest not in self._seen:
                self._seen.add(digest)
                self._digests[pattern] = solution.digest()
                chosen.append(solution)
        return chosen

    def _solution(self, pattern: P, parent: P | None) -> Solution:
        definition = self._definition.name
        return Solution(
            name=f"{definition}-m{self._min_m}-{self._max_m}-{pattern.label()}",
            definition=definition,
            author=NAME,
            spec=BuildSpec(target_hardware=(pattern.isa.name,)),
            sources=self._vocabulary.sources(pattern),
            x_polymorph=SolutionExtension(
                parent=None if parent is None else self._digests.get(parent),
                proposer=NAME,
                pattern=self._vocabulary.pattern,
                params=pattern.params(),
                isa=pattern.isa.name,
                layout_source=self._vocabulary.layout_source,
                numerics=Numerics.REORDERED,
                min_m=self._min_m,
                max_m=self._max_m,
            ),
        )


def propose_for(
    definition: Definition,
    min_m: int,
    max_m: int,
    isa: Isa,
    *,
    rng: random.Random,
    seeds: Sequence[Mapping[str, str]] = (),
    batch: int = BATCH,
) -> PatternProposer[Any] | None:
    """The agent for an operation; None where it knows no patterns for it."""
    vocabulary = vocabulary_for(definition, max_m, isa)
    if vocabulary is None:
        return None
    return PatternProposer(definition, min_m, max_m, vocabulary, rng=rng, seeds=seeds, batch=batch)


def is_beyond_agents(name: str) -> bool:
    """Whether an operation of ours has slots and kernels, and no agent that writes new ones: a search would find nothing."""
    try:
        return definition_named(name).op_type not in _PATTERNED
    except ValueError:
        return False


def vocabulary_for(definition: Definition, max_m: int, isa: Isa) -> Vocabulary[Any] | None:
    """The patterns known for an operation; None where there are none."""
    if max_m < 1:
        raise ValueError(f"max_m is {max_m}: a call computes at least 1 token")
    if definition.inputs.get("x") is None or definition.inputs["x"].dtype not in ("float32", "bfloat16"):
        return None
    if definition.op_type == "gemm":
        return LinearVocabulary(definition, max_m, isa)
    if definition.op_type in ("rmsnorm", "fused_add_rmsnorm"):
        return NormVocabulary(definition, max_m, isa)
    return None


def _changed(one: Pattern, other: Pattern) -> str:
    before, after = one.params(), other.params()
    return next((name for name in before if before[name] != after[name]), "")
