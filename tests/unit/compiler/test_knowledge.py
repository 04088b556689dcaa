"""A second search starts from what the first one learnt, on the same hardware only."""

import pytest

from polymorph.compiler.domain.knowledge import Knowledge, Lesson, OperationClass, lessons
from polymorph.compiler.domain.search_state import Candidate
from polymorph.events.values import Gate


def lesson(definition, block, low, *, m=(1, 8), confirmed=False, high=None, hardware="test-cpu"):
    return Lesson(
        definition=definition,
        hardware=hardware,
        min_m=m[0],
        max_m=m[1],
        pattern="blocks",
        params={"block": block},
        low=low,
        high=high if high is not None or low is None else low + 0.02,
        confirmed=confirmed,
        gate=Gate.G3_MICRO,
        reason="told",
    )


QKV, GATE_UP, DOWN = "gemm_n960_k576_f32", "gemm_n3072_k576_f32", "gemm_n576_k1536_f32"
NORM = "rms_norm_h576_f32"


def known(*taught):
    return Knowledge(hardware="test-cpu").learn(taught)


def test_a_definition_is_taken_apart():
    assert OperationClass.of(GATE_UP) == OperationClass(
        operation="gemm", dtype="f32", sizes={"n": 3072, "k": 576}
    )
    assert OperationClass.of(NORM).operation == "rms_norm"
    assert OperationClass.of(QKV).distance(OperationClass.of(NORM)) == float("inf")
    assert OperationClass.of(QKV).distance(OperationClass.of(QKV)) == 0


def test_wins_of_the_nearest_size_come_first():
    base = known(lesson(DOWN, "far", 1.5), lesson(GATE_UP, "near", 1.2))
    assert base.seeds(QKV, 1, 8, limit=3) == ({"block": "near"}, {"block": "far"})


def test_losses_other_classes_and_other_m_give_no_seed():
    base = known(
        lesson(GATE_UP, "slow", 0.9), lesson(NORM, "norm", 1.5), lesson(GATE_UP, "prefill", 1.5, m=(257, 512))
    )
    assert base.seeds(QKV, 1, 8, limit=3) == ()


def test_another_dtype_gives_no_seed():
    assert known(lesson("gemm_n3072_k576_bf16", "a", 1.5)).seeds(QKV, 1, 8, limit=3) == ()


def test_confirmed_wins_come_before_lucky_looks():
    base = known(lesson(GATE_UP, "lucky", 1.5), lesson(GATE_UP, "sure", 1.2, confirmed=True))
    assert base.seeds(GATE_UP, 1, 8, limit=1) == ({"block": "sure"},)


def test_what_is_wrong_is_avoided_everywhere_and_what_is_slow_at_the_same_m():
    base = known(lesson(QKV, "wrong", None), lesson(QKV, "slow", 0.8), lesson(QKV, "unsure", 0.99))
    assert base.avoid(QKV, 1, 8) == ({"block": "wrong"}, {"block": "slow"})
    assert base.avoid(QKV, 257, 512) == ({"block": "wrong"},)
    assert base.avoid(GATE_UP, 1, 8) == ()


def test_headroom_is_larger_where_few_tokens_meet_and_shrinks_once_tried():
    fresh = known()
    assert fresh.headroom(QKV, 1, 8) > fresh.headroom(QKV, 257, 512) > 0
    tried = known(lesson(QKV, "slow", 0.8))
    assert tried.headroom(QKV, 1, 8) == fresh.headroom(QKV, 1, 8) / 2


def test_no_headroom_where_no_agent_writes():
    for name in ("attn_decode_q9_kv3_d64_b128_f32", "top_k_top_p_v49152_f32", "silu_and_mul_d1536_f32"):
        assert known().headroom(name, 1, 8) == 0.0


def test_headroom_of_a_class_follows_its_confirmed_wins():
    assert known(lesson(GATE_UP, "a", 2.0, confirmed=True)).headroom(QKV, 1, 8) == pytest.approx(0.5)


def test_hardware_is_never_mixed():
    with pytest.raises(ValueError, match="other-cpu"):
        known(lesson(QKV, "a", 1.5, hardware="other-cpu"))


def test_learning_twice_is_learning_once():
    once = lesson(QKV, "a", 1.5)
    assert known(once).learn([once]).lessons == (once,)


def test_lessons_tell_the_winner_from_what_failed_its_confirmation(lab):
    def judged(name, ratio, confirmation):
        candidate = Candidate(
            candidate_id=name,
            solution=name,
            name=name,
            parent=None,
            proposer="double",
            pattern="blocks",
            params={"block": name},
            turn=1,
        )
        order = lab.machine([["x"]]).begin(lab.search(), lab.START)[0].pending[0].order
        look = lab.answer(order, ratio)
        return candidate.model_copy(
            update={"look": look, "confirmations": (confirmation(order),) if confirmation else ()}
        )

    search = lab.search(
        candidates=(
            judged("win", 1.3, lambda o: lab.answer(o, 1.2)),
            judged("wrong", None, None),
        ),
        winner="win",
    )
    taught = {x.params["block"]: x for x in lessons(search)}
    assert taught["win"].confirmed
    assert taught["win"].low == pytest.approx(1.29)
    assert taught["wrong"].hopeless()
