"""One search: rounds, budget, confirmation, and what it says when nothing is better."""

import datetime as dt

from polymorph.compiler.domain.search_state import Announce, Answer, Keep, Order, Phase, Promote, Search
from polymorph.events.types import CandidateProposed, SearchClosed
from polymorph.events.values import Gate, Verdict


def drive(machine, search, now, say):
    """Answers every order by `say(order)`, in order, until the search asks nothing more."""
    search, effects = machine.begin(search, now)
    log = list(effects)
    queue = [e.command for e in effects if isinstance(e, Order)]
    while queue:
        order = queue.pop(0)
        search = Search.model_validate_json(search.model_dump_json())
        search, effects = machine.evaluated(search, say(order), now)
        log += effects
        queue += [e.command for e in effects if isinstance(e, Order)]
    return search, log


def named(search):
    return {c.candidate_id: c.name for c in search.candidates}


def closing(log):
    return [e.event for e in log if isinstance(e, Announce) and isinstance(e.event, SearchClosed)]


def by_name(lab, machine, table, confirm=None):
    """Runs a search whose candidates get the ratio that stands beside their name."""
    names = {lab.solution(lab.GATE_UP, name).digest(): name for name in table}

    def say(order):
        name = names[order.solution]
        if order.confirm_seed and confirm is not None:
            return lab.answer(order, *confirm[name])
        return lab.answer(order, table[name])

    return drive(machine, lab.search(), lab.START, say)


def test_best_is_confirmed_on_a_fresh_seed_and_handed_over(lab):
    search, log = by_name(lab, lab.machine([["a", "b", "c"]]), {"a": 1.1, "b": 1.3, "c": None})
    confirmed = [e.command for e in log if isinstance(e, Order) and e.command.until is Gate.G5_END_TO_END]
    assert [named(search)[o.candidate_id] for o in confirmed] == ["b"]
    assert confirmed[0].confirm_seed > 0
    proposal = next(e.proposal for e in log if isinstance(e, Promote))
    assert proposal.bindings[0].artifact == f"artifact-{search.winner}"
    assert (proposal.bindings[0].min_m, proposal.bindings[0].max_m) == (1, 8)
    assert search.phase is Phase.PROMOTING
    closed, effects = lab.machine([]).promoted(search, Answer.LIVE, "done")
    assert closed.phase is Phase.CLOSED
    assert closing(effects)[0].outcome == "promoted"
    assert closing(effects)[0].winner == search.winner
    assert closing(effects)[0].cpu_s == 1.5 * 4


def test_solutions_are_kept_before_they_are_proposed(lab):
    _, log = by_name(lab, lab.machine([["a"]]), {"a": 1.1})
    kept = [n for n, e in enumerate(log) if isinstance(e, Keep)]
    told = [
        n for n, e in enumerate(log) if isinstance(e, Announce) and isinstance(e.event, CandidateProposed)
    ]
    assert kept[0] < told[0]
    assert log[kept[0]].data == lab.solution(lab.GATE_UP, "a").canonical()


def test_no_more_than_in_flight_are_out_at_once(lab):
    search, effects = lab.machine([["a", "b", "c", "d"]], in_flight=2).begin(lab.search(), lab.START)
    assert len([e for e in effects if isinstance(e, Order)]) == 2
    assert len(search.queued()) == 2


def test_a_round_that_brings_nothing_better_ends_the_search(lab):
    machine = lab.machine([["a"], ["b"], ["c"]])
    search, _ = by_name(lab, machine, {"a": 1.2, "b": 1.1, "c": 1.5})
    assert [c.name for c in search.candidates] == ["a", "b"]
    assert "nothing better" in search.stopped


def test_rounds_go_on_while_they_bring_something(lab):
    machine = lab.machine([["a"], ["b"], ["c"]])
    search, _ = by_name(lab, machine, {"a": 1.1, "b": 1.2, "c": 1.3})
    assert named(search)[search.winner] == "c"


def test_budget_of_candidates_holds(lab):
    machine = lab.machine([["a", "b", "c"]], candidates=2)
    search, _ = by_name(lab, machine, {"a": 1.1, "b": 1.2, "c": 1.9})
    assert len(search.candidates) == 2
    assert named(search)[search.winner] == "b"


def test_budget_of_seconds_ends_the_looking_and_confirms_what_is_there(lab):
    machine = lab.machine([["a", "b", "c"]], seconds=60, in_flight=1)
    search, effects = machine.begin(lab.search(), lab.START)
    order = next(e.command for e in effects if isinstance(e, Order))
    search, effects = machine.evaluated(search, lab.answer(order, 1.2), lab.START + dt.timedelta(seconds=61))
    assert search.phase is Phase.CONFIRMING
    assert [e.command.until for e in effects if isinstance(e, Order)] == [Gate.G5_END_TO_END]


def test_next_best_is_tried_where_the_confirmation_fails(lab):
    table = {"a": 1.1, "b": 1.3, "c": 1.2}
    confirm = {"b": (0.9, Verdict.FAILED), "c": (1.15,), "a": (1.1,)}
    search, _ = by_name(lab, lab.machine([["a", "b", "c"]]), table, confirm)
    assert named(search)[search.winner] == "c"


def test_an_inconclusive_confirmation_is_repeated_once_with_other_seeds(lab):
    table = {"a": 1.1, "b": 1.3}
    confirm = {"b": (1.2, Verdict.INCONCLUSIVE), "a": (1.05,)}
    search, log = by_name(lab, lab.machine([["a", "b"]]), table, confirm)
    confirmed = [e.command for e in log if isinstance(e, Order) and e.command.confirm_seed]
    assert [named(search)[o.candidate_id] for o in confirmed] == ["b", "b", "a"]
    assert len({o.confirm_seed for o in confirmed}) == 3
    assert len({o.evaluation_id for o in confirmed}) == 3


def test_confirmations_are_tried_on_three_at_most(lab):
    table = dict.fromkeys("abcde", 1.2)
    confirm = dict.fromkeys("abcde", (0.9, Verdict.FAILED))
    search, log = by_name(lab, lab.machine([list("abcde")]), table, confirm)
    assert len([e for e in log if isinstance(e, Order) and e.command.confirm_seed]) == 3
    assert closing(log)[0].outcome == "nothing-better"
    assert search.winner is None


def test_nothing_better_names_the_three_nearest_and_why_each_lost(lab):
    table = {"a": 1.005, "b": 0.9, "c": None, "d": 0.99}
    _, log = by_name(lab, lab.machine([list("abcd")]), table)
    end = closing(log)[0]
    assert end.outcome == "nothing-better"
    places = [end.reason.index(f"{name}: ") for name in "adb"]
    assert places == sorted(places)
    assert "c: " not in end.reason
    assert "not certainly above 1.01x" in end.reason


def test_measured_losers_are_nearer_than_what_was_never_measured(lab):
    names = {lab.solution(lab.GATE_UP, name).digest(): name for name in "abcd"}

    def say(order):
        ratio = {"a": None, "b": 0.8, "c": 0.9, "d": 0.7}[names[order.solution]]
        return lab.answer(order, ratio, Verdict.FAILED)

    _, log = drive(lab.machine([list("abcd")]), lab.search(), lab.START, say)
    reason = closing(log)[0].reason
    assert reason.index("c: 0.9") < reason.index("b: 0.8") < reason.index("d: 0.7")
    assert " a: " not in reason


def test_no_gain_within_the_margin_is_confirmed(lab):
    _, log = by_name(lab, lab.machine([["a"]], margin=0.05), {"a": 1.05})
    assert not [e for e in log if isinstance(e, Order) and e.command.confirm_seed]


def test_a_pass_without_a_signed_manifest_promotes_nothing(lab):
    def say(order):
        event = lab.answer(order, 1.3)
        return event.model_copy(update={"manifest": None}) if order.confirm_seed else event

    _, log = drive(lab.machine([["a"]]), lab.search(), lab.START, say)
    assert not [e for e in log if isinstance(e, Promote)]
    assert closing(log)[0].outcome == "nothing-better"


def test_an_end_to_end_loss_promotes_nothing(lab):
    _, log = by_name(lab, lab.machine([["a"]]), {"a": 1.3}, {"a": (0.98,)})
    assert not [e for e in log if isinstance(e, Promote)]


def test_an_answer_told_twice_changes_nothing(lab):
    machine = lab.machine([["a", "b"]])
    search, effects = machine.begin(lab.search(), lab.START)
    event = lab.answer(next(e.command for e in effects if isinstance(e, Order)), 1.2)
    once, _ = machine.evaluated(search, event, lab.START)
    twice, effects = machine.evaluated(once, event, lab.START)
    assert (twice, effects) == (once, [])


def test_overdue_orders_are_sent_again_with_growing_patience(lab):
    machine = lab.machine([["a"]], answer_s=100)
    search, effects = machine.begin(lab.search(), lab.START)
    sent = next(e.command for e in effects if isinstance(e, Order))

    def at(seconds):
        return lab.START + dt.timedelta(seconds=seconds)

    assert machine.tick(search, at(99)) == (search, [])
    search, again = machine.tick(search, at(100))
    assert again == [Order(sent, again=True)]
    assert machine.tick(search, at(299))[1] == []
    assert machine.tick(search, at(300))[1] == [Order(sent, again=True)]


def unanswered_for(machine, search, hours, *, every=60):
    """Time goes on and nobody answers; with it, the effects of every tick."""
    now, log = search.opened_at, []
    while search.phase is not Phase.CLOSED and now < search.opened_at + dt.timedelta(hours=hours):
        now += dt.timedelta(seconds=every)
        search, effects = machine.tick(search, now)
        log += effects
    return search, log, (now - search.opened_at).total_seconds()


def test_a_search_that_nobody_answers_ends_by_its_time(lab):
    machine = lab.machine([["a", "b", "c"]], seconds=600, answer_s=300)
    search, _ = machine.begin(lab.search(), lab.START)
    search, log, took = unanswered_for(machine, search, hours=24)
    assert search.phase is Phase.CLOSED
    assert took <= 600 + 300 + 60
    assert "no evaluator answered" in closing(log)[0].reason
    assert "600 s were spent" in closing(log)[0].reason


def test_one_unanswered_evaluation_is_given_up_and_the_others_go_on(lab):
    machine = lab.machine([["a", "b"]], seconds=1e6, answer_s=100, sends=2, in_flight=2)
    search, effects = machine.begin(lab.search(), lab.START)
    lost, answered = [e.command for e in effects if isinstance(e, Order)]
    search, _ = machine.evaluated(search, lab.answer(answered, 1.2), lab.START)
    search, again = machine.tick(search, lab.START + dt.timedelta(seconds=100))
    assert again == [Order(lost, again=True)]
    search, effects = machine.tick(search, lab.START + dt.timedelta(seconds=300))
    assert search.candidate(lost.candidate_id).look.verdict is Verdict.INCONCLUSIVE
    assert [e.command.candidate_id for e in effects if isinstance(e, Order)] == [answered.candidate_id]
    assert search.phase is Phase.CONFIRMING


def test_a_confirmation_that_nobody_answers_ends_too(lab):
    machine = lab.machine([["a"]], seconds=60, answer_s=100)
    search, effects = machine.begin(lab.search(), lab.START)
    order = next(e.command for e in effects if isinstance(e, Order))
    search, _ = machine.evaluated(search, lab.answer(order, 1.2), lab.START)
    assert search.phase is Phase.CONFIRMING
    search, log, _ = unanswered_for(machine, search, hours=24)
    assert [e.outcome for e in closing(log)] == ["nothing-better"]
    sends = [e.command.evaluation_id for e in log if isinstance(e, Order)]
    assert max(sends.count(name) for name in sends) <= 3


def test_a_search_that_resumes_asks_again_for_what_is_pending(lab):
    machine = lab.machine([["a", "b", "c"]])
    search, effects = machine.begin(lab.search(), lab.START)
    sent = [e.command for e in effects if isinstance(e, Order)]
    assert machine.resume(search) == [Order(command, again=True) for command in sent]


def test_known_failures_are_not_proposed_again(lab):
    machine = lab.machine([["a", "b"]])
    search, _ = machine.begin(lab.search(avoid=({"block": "a"},)), lab.START)
    assert [c.name for c in search.candidates] == ["b"]


def test_an_agent_without_an_idea_closes_the_search_at_once(lab):
    _, effects = lab.machine([[]]).begin(lab.search(), lab.START)
    assert closing(effects)[0].outcome == "nothing-better"
    assert "Nothing was proposed" in closing(effects)[0].reason


def test_a_held_winner_waits_and_is_asked_for_again(lab):
    search, _ = by_name(lab, lab.machine([["a"]]), {"a": 1.2})
    machine = lab.machine([])
    held, effects = machine.promoted(search, Answer.HELD, "approval")
    assert (held.phase, effects) == (Phase.WAITING, [])
    again, effects = machine.asked_again(held)
    assert again.phase is Phase.PROMOTING
    assert [type(e) for e in effects] == [Promote]


def test_a_promotion_under_way_keeps_the_search_open(lab):
    search, _ = by_name(lab, lab.machine([["a"]]), {"a": 1.2})
    assert lab.machine([]).promoted(search, Answer.UNDER_WAY, "canary") == (search, [])


def test_a_refused_promotion_closes_the_search_as_failed(lab):
    search, _ = by_name(lab, lab.machine([["a"]]), {"a": 1.2})
    _, effects = lab.machine([]).promoted(search, Answer.REFUSED, "artifact x is in quarantine")
    assert (closing(effects)[0].outcome, closing(effects)[0].winner) == ("failed", None)
    assert "quarantine" in closing(effects)[0].reason
