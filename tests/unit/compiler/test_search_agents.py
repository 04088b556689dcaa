"""The agents behind a search: real sources, the same again after a restart, and nothing for the unknown."""

from polymorph.compiler.domain.search import Budget, SearchMachine
from polymorph.compiler.domain.search_agents import Agents
from polymorph.compiler.domain.search_state import Keep, Order, Search
from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import Solution


def run(lab, machine, search, *, restart):
    """A whole search against the table double; `restart` makes machine and state anew at every step."""
    say = lab.TableEvaluator(seed=3)
    search, effects = machine().begin(search, lab.START)
    one, log = machine(), list(effects)
    queue = [e.command for e in effects if isinstance(e, Order)]
    while queue:
        if restart:
            one, search = machine(), Search.model_validate_json(search.model_dump_json())
        search, effects = one.evaluated(search, say(queue.pop(0)), lab.START)
        log += effects
        queue += [e.command for e in effects if isinstance(e, Order)]
    return search, log


def test_a_search_with_the_pattern_agent_is_the_same_with_a_restart_at_every_step(lab):
    def machine():
        return SearchMachine(Budget(candidates=16), Agents(Isa.AVX2), lambda: 5)

    steady, log = run(lab, machine, lab.search(), restart=False)
    broken, _ = run(lab, machine, lab.search(), restart=True)
    assert steady == broken
    assert len(steady.candidates) == 16
    assert steady.winner is not None
    kept = [Solution.model_validate_json(e.data) for e in log if isinstance(e, Keep)]
    assert all(solution.sources and solution.definition == lab.GATE_UP for solution in kept)
    assert [s.digest() for s in kept] == [c.solution for c in steady.candidates]


def test_what_won_elsewhere_is_proposed_first(lab):
    agents = Agents(Isa.AVX2)
    usual = agents(lab.search()).next([])
    favourite = usual[-1].x_polymorph.params
    seeded = agents(lab.search(seeds=(favourite,))).next([])
    assert seeded[0].x_polymorph.params == favourite
    assert usual[0].x_polymorph.params != favourite


def test_when_all_of_a_batch_is_hopeless_the_agent_is_asked_for_others(lab):
    agents = Agents(Isa.AVX2)
    hopeless = tuple(s.x_polymorph.params for s in agents(lab.search()).next([]))
    machine = SearchMachine(Budget(candidates=4), agents, lambda: 5)
    search, _ = machine.begin(lab.search(avoid=hopeless), lab.START)
    assert search.candidates
    assert all(c.params not in hopeless for c in search.candidates)


def test_an_operation_that_nobody_knows_gets_no_proposals(lab):
    target = lab.search().target.model_copy(update={"definition": "attention_h64_f32"})
    assert Agents(Isa.AVX2)(lab.search(target=target)).next([]) == []
