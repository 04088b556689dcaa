"""Which agent works on a search. Made anew from the same search, it proposes the same again."""

import random
from collections.abc import Sequence

from polymorph.compiler.domain.agents.proposer import propose_for
from polymorph.compiler.domain.search_state import Proposer, Result, Search
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import Solution


class Speechless:
    """Knows nothing about the operation."""

    def next(self, results: Sequence[Result]) -> list[Solution]:
        del results
        return []


class Agents:
    """Finds the agent for an operation on machines of one tier."""

    def __init__(self, isa: Isa) -> None:
        self._isa = isa

    def __call__(self, search: Search) -> Proposer:
        try:
            definition = definition_named(search.target.definition)
        except ValueError:
            return Speechless()
        target = search.target
        rng = random.Random(search.search_id)  # noqa: S311 - to be repeated, not to be secret
        found = propose_for(definition, target.min_m, target.max_m, self._isa, rng=rng, seeds=search.seeds)
        return found or Speechless()
