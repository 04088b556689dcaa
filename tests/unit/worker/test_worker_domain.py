"""What a worker believes and decides, without an engine or a bus."""

import dataclasses
import datetime as dt
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from polymorph.bus.errors import Retryable
from polymorph.engine.loading.admission import Fence, Refused, admit_binding, admit_manifest
from polymorph.engine.loading.counters import NOTHING, Counters, hits
from polymorph.engine.loading.generation import GenerationFile
from polymorph.engine.loading.rows import exercise_sizes, sample_rows
from polymorph.engine.loading.target import standing, target
from polymorph.events.state import EMPTY, DesiredState, PromoterSignature, Reordered, Stage
from polymorph.events.values import KernelBinding, Numerics, Revision, SampledSteps
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import Manifest, SignedManifest
from polymorph.kernels.signing import Role, Signer, Trust, sign_manifest
from polymorph.worker.domain.numerics import identity, waits_for
from polymorph.worker.domain.request_ids import client_request_id
from polymorph.worker.domain.steps import Load, StepTally, histogram, shares

KERNEL = KernelBinding(
    definition="gemm_n16_k16_f32",
    min_m=1,
    max_m=8,
    manifest="m" * 64,
    artifact="a" * 64,
    numerics=Numerics.REORDERED,
)


@pytest.fixture
def promoter(tmp_path: Path) -> Signer:
    return Signer.generate(tmp_path / "promoter.pem")


@pytest.fixture
def evaluator(tmp_path: Path) -> Signer:
    return Signer.generate(tmp_path / "evaluator.pem")


@pytest.fixture
def trust(promoter: Signer, evaluator: Signer) -> Trust:
    made = Trust()
    made.add(promoter.public, Role.PROMOTER)
    made.add(evaluator.public, Role.EVALUATOR)
    return made


def _state(generation: int, signer: Signer | None = None, **fields: Any) -> DesiredState:
    stable = fields.pop("stable", Revision(revision="r", kernels=(KERNEL,)))
    state = DesiredState(pool="p", generation=generation, stable=stable, **fields)
    if signer is None:
        return state
    signature = PromoterSignature(key_id=signer.key_id, signature=signer.sign(state.signed_content()))
    return state.model_copy(update={"signature": signature})


def test_generations_only_grow(trust: Trust, promoter: Signer) -> None:
    fence = Fence("p", trust)
    fence.admit(_state(3, promoter))
    fence.admit(_state(3, promoter))
    with pytest.raises(Refused, match="older than 3"):
        fence.admit(_state(2, promoter))
    fence.admit(_state(4, promoter))
    assert fence.newest == 4


def test_an_unsigned_state_may_hold_nothing(trust: Trust) -> None:
    fence = Fence("p", trust)
    fence.admit(_state(0, stable=EMPTY))
    with pytest.raises(Refused, match="not signed"):
        fence.admit(_state(1))
    assert fence.newest == 0


def test_an_unsigned_state_is_a_pools_first_alone(trust: Trust, promoter: Signer) -> None:
    kept: list[int] = []
    fence = Fence("p", trust, 7, kept.append)
    with pytest.raises(Refused, match="generation 8 is not signed"):
        fence.admit(_state(8, stable=EMPTY))
    assert (fence.newest, kept) == (7, [])
    fence.admit(_state(8, promoter))
    assert (fence.newest, kept) == (8, [8])


def test_a_changed_or_foreign_state_is_refused(trust: Trust, promoter: Signer, evaluator: Signer) -> None:
    fence = Fence("p", trust)
    changed = _state(1, promoter).model_copy(update={"generation": 9})
    with pytest.raises(Refused, match="did not sign"):
        fence.admit(changed)
    with pytest.raises(Refused, match="evaluator's"):
        fence.admit(_state(1, evaluator))
    with pytest.raises(Refused, match="pool p"):
        Fence("q", trust).admit(_state(1, promoter))


def test_the_newest_generation_outlives_a_restart(tmp_path: Path, trust: Trust, promoter: Signer) -> None:
    file = GenerationFile(tmp_path / "generation-p")
    Fence("p", trust, file.read(), file.write).admit(_state(7, promoter))
    again = Fence("p", trust, file.read(), file.write)
    with pytest.raises(Refused, match="older than 7"):
        again.admit(_state(6, promoter))
    again.admit(_state(7, promoter))


def test_a_generation_that_cannot_be_kept_is_new_the_next_time(
    tmp_path: Path, trust: Trust, promoter: Signer
) -> None:
    in_the_way = tmp_path / "generation-p.new"
    in_the_way.mkdir()
    file = GenerationFile(tmp_path / "generation-p")
    fence = Fence("p", trust, file.read(), file.write)
    with pytest.raises(Retryable, match="generation 7 cannot be kept"):
        fence.admit(_state(7, promoter))
    in_the_way.rmdir()
    fence.admit(_state(7, promoter))
    assert file.read() == 7


def _manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "artifact": KERNEL.artifact,
        "definition": KERNEL.definition,
        "definition_digest": definition_named(KERNEL.definition).digest(),
        "solution": "s",
        "hardware": "here",
        "isa": "AVX2",
        "toolchain": "t",
        "layout": None,
        "numerics": Numerics.REORDERED,
        "min_m": 1,
        "max_m": 8,
        "evidence": "e",
    }
    return Manifest(**(fields | changes))


def admit_kernel(
    binding: KernelBinding,
    signed: SignedManifest,
    trust: Trust,
    *,
    quarantined: Collection[str] = (),
    **more: Any,
) -> Manifest:
    manifest = admit_manifest(binding.definition, signed, trust, hardware="here", **more)
    admit_binding(binding, manifest, quarantined)
    return manifest


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"artifact": "b" * 64}, "artifact"),
        ({"definition": "gemm_n8_k8_f32"}, "definition"),
        ({"numerics": Numerics.BITWISE}, "numerics"),
        ({"max_m": 4}, "approved from 1 to 4"),
        ({"abi": "triton-1"}, "of ABI triton-1"),
        ({"hardware": "there"}, "measured on there"),
        ({"isa": "AVX512"}, "needs AVX512"),
        ({"isa": "MMX"}, "needs MMX"),
        ({"toolchain": "gxx-0"}, "compiled by gxx-0, taken here is t"),
        ({"definition_digest": "f" * 64}, "judged by definition ffffffffffff, this installation's is"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    trust: Trust, evaluator: Signer, changes: dict[str, Any], reason: str
) -> None:
    signed = sign_manifest(_manifest(**changes), evaluator)
    with pytest.raises(Refused, match=reason):
        admit_kernel(KERNEL, signed, trust, isa=Isa.AVX2, toolchains=("t",))


MOE = KERNEL.model_copy(update={"definition": "moe_e4_k2_h32_i32_f32"})


@pytest.mark.parametrize(
    ("kernel", "bound", "approved", "reason"),
    [
        (MOE, {}, {}, None),
        (MOE, {"least": 60, "most": 90}, {}, None),
        (MOE, {"least": 60, "most": 90}, {"least": 60, "most": 90}, None),
        (MOE, {"least": 61}, {"least": 60}, None),
        (MOE, {}, {"least": 60}, "feature from 0 to any value, and was approved from 60 to any value"),
        (MOE, {"least": 60}, {"most": 90}, "feature from 60 to any value, and was approved from 0 to 90"),
        (MOE, {"least": 59, "most": 70}, {"least": 60, "most": 90}, "from 59 to 70"),
        (KERNEL, {"most": 50}, {}, "no feature that could lie from 0 to 50"),
    ],
)
def test_a_binding_claims_no_more_of_the_feature_than_was_approved(
    trust: Trust,
    evaluator: Signer,
    kernel: KernelBinding,
    bound: dict[str, int],
    approved: dict[str, int],
    reason: str | None,
) -> None:
    digest = definition_named(kernel.definition).digest()
    manifest = _manifest(definition=kernel.definition, definition_digest=digest, **approved)
    signed = sign_manifest(manifest, evaluator)
    binding = kernel.model_copy(update=bound)

    def admit() -> Manifest:
        return admit_kernel(binding, signed, trust, isa=Isa.AVX2)

    if reason is None:
        assert admit() == signed.manifest
    else:
        with pytest.raises(Refused, match=reason):
            admit()


def test_a_manifest_without_a_feature_is_signed_as_it_was_before_there_were_any() -> None:
    assert b"least" not in _manifest().canonical()
    assert b"most" not in _manifest().canonical()
    assert b'"least":60' in _manifest(least=60).canonical()


def test_a_manifest_that_fits_is_admitted_unless_in_quarantine(
    trust: Trust, evaluator: Signer, promoter: Signer
) -> None:
    def admit(signer: Signer, *quarantined: str) -> Manifest:
        signed = sign_manifest(_manifest(), signer)
        return admit_kernel(KERNEL, signed, trust, isa=Isa.AVX512, quarantined=quarantined)

    assert admit(evaluator).artifact == KERNEL.artifact
    with pytest.raises(Refused, match="quarantine"):
        admit(evaluator, KERNEL.artifact)
    with pytest.raises(Refused, match="promoter's"):
        admit(promoter)


def test_the_target_is_stable_but_for_those_that_try() -> None:
    candidate = Revision(revision="new", kernels=(KERNEL,))
    stable = Revision(revision="old")

    def goal(stage: Stage, share: float, worker: str = "w") -> str:
        state = DesiredState(
            pool="p",
            generation=1,
            stable=stable,
            candidate=candidate,
            stage=stage,
            share=share,
            promotion_id="x",
        )
        return target(state, worker).revision

    assert goal(Stage.SHADOW, 1.0) == "old"
    assert goal(Stage.CANARY, 0.0) == "old"
    assert goal(Stage.CANARY, 1.0) == "new"
    assert goal(Stage.FULL, 0.0) == "new"
    tried = sum(goal(Stage.CANARY, 0.25, f"w{n}") == "new" for n in range(400))
    assert 60 < tried < 140
    assert target(None, "w") == EMPTY
    assert standing("w", "x") != standing("w", "y")


def test_steps_fold_into_one_report() -> None:
    tally = StepTally()
    tally.step(1, 0.01)
    tally.step(7, 0.02)
    tally.step(8, 0.03)
    tally.output_tokens += 16
    tally.load = Load(running=8, waiting=1, kv_used=0.5)

    def report() -> Any:
        return tally.report(
            pool="p",
            worker_id="w",
            at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
            interval_s=1.0,
            counted=dataclasses.replace(
                NOTHING,
                nanoseconds={
                    "gemm": {"1": 10_000_000, "8": 20_000_000},
                    "norm": {"8": 6_000_000},
                    "idle": {"1": 0},
                },
                sampled={"1": {"linear": 5_000_000, "rest": 1_000_000}, "8": {"linear": 0}},
                sampled_steps={"1": 2, "8": 0},
            ),
            revision="r",
        )

    first = report()
    assert (first.steps, first.tokens, first.output_tokens, first.running) == (3, 16, 16, 8)
    assert first.step_s_by_m == pytest.approx({"1": 0.01, "8": 0.05})
    assert [operation.definition for operation in first.operations] == ["gemm", "norm"]
    assert first.operations[0].share == pytest.approx(0.5)
    assert first.operations[0].by_m == pytest.approx({"1": 1 / 6, "8": 1 / 3})
    assert first.sampled_by_m == {"1": SampledSteps(steps=2, seconds={"linear": 0.005, "rest": 0.001})}
    second = report()
    assert (second.steps, second.tokens, second.step_s_by_m, second.operations) == (0, 0, {}, ())
    assert second.running == 8


def test_shares_never_exceed_the_whole() -> None:
    counted = dataclasses.replace(NOTHING, nanoseconds={"gemm": {"1": 500_000_000, "8": 1_500_000_000}})
    whole = shares(counted, 1.0)[0]
    assert whole.share == 1.0
    assert whole.by_m == {"1": 0.25, "8": 0.75}


def test_experts_are_told_by_rank_whichever_they_are_in_a_layer() -> None:
    def document(*layers: list[int]) -> dict[str, Any]:
        tally = {"calls": 1, "ns": 10}
        moe = {"native": tally, "by_m": {"1": tally}, "experts": list(layers)}
        return {"definitions": {"moe": moe}, "artifacts": {}, "steps": {}}

    before, now = Counters.of(document([9, 0, 1], [0, 2, 2])), Counters.of(document([9, 6, 1], [4, 2, 4]))
    counted = dataclasses.replace(now.since(before), nanoseconds={"moe": {"1": 1_000_000}})
    assert counted.experts == {"moe": ((0, 6, 0), (4, 0, 2))}
    (operation,) = shares(counted, 1.0)
    assert operation.experts == pytest.approx((10 / 12, 2 / 12, 0.0))
    assert now.since(NOTHING).experts == now.experts
    assert histogram(((0, 0), (0, 0))) == ()


def test_counters_by_artifact_and_operation() -> None:
    def document(calls: int) -> dict[str, Any]:
        tally = {"calls": calls, "ns": calls * 10}
        return {
            "definitions": {"gemm": {"native": tally, "by_m": {"1": tally, "8": tally}}},
            "artifacts": {"a": {"served": tally, "by_m": {"8": tally}, "errors": 1}},
            "steps": {"8": {"sampled_steps": calls, "families": {"linear": calls * 7}}},
        }

    since = Counters.of(document(5)).since(Counters.of(document(2)))
    assert since.nanoseconds == {"gemm": {"1": 30, "8": 30}}
    assert since.called("gemm", 1, 8) == 6
    assert since.called("gemm", 5, 8) == 3
    assert since.called("gemm", 5, 6) == 0  # a bucket is counted as a whole or not at all
    assert since.called("norm", 1, 8) == 0
    assert since.served == {"a": 3}
    assert since.errors == {"a": 0}
    assert since.served_by_m == {"a": {"8": 3}}
    assert since.sampled == {"8": {"linear": 21}}
    assert since.sampled_steps == {"8": 3}


def test_hits_by_slot_and_bucket() -> None:
    counted = dataclasses.replace(
        NOTHING,
        calls={"norm": {"1": 7}, "gemm": {"1": 5, "8": 2}},
        served_by_m={"a": {"1": 4}, "gone": {"1": 9}},
    )
    gemm, norm = hits(counted, [("gemm", "a"), ("gemm", "b")])
    assert (gemm.definition, gemm.calls) == ("gemm", {"1": 5, "8": 2})
    assert gemm.by_kernel == {"a": {"1": 4}, "b": {}}
    assert (norm.calls, norm.by_kernel) == ({"1": 7}, {})


@pytest.mark.parametrize(
    ("engine_id", "client_id"),
    [
        ("chatcmpl-req-7", "req-7"),
        ("cmpl-req-7-0", "req-7"),
        ("cmpl-abc-0", "abc"),
        ("polymorph-self-3", None),
    ],
)
def test_request_ids_come_back_as_they_were_sent(engine_id: str, client_id: str | None) -> None:
    assert client_request_id(engine_id) == client_id


def test_rows_cover_both_ends_and_stay_small() -> None:
    assert sample_rows(1, 1) == (1,)
    assert sample_rows(5, 8) == (5, 6, 7, 8)
    assert max(sample_rows(1, 1 << 30)) == 256
    assert exercise_sizes(5, 8) == (8, 5, 6)
    assert exercise_sizes(1, 1) == (1,)


def _of(artifact: str, numerics: Numerics) -> KernelBinding:
    return KERNEL.model_copy(update={"artifact": artifact, "numerics": numerics})


@pytest.mark.parametrize(
    ("now", "goal", "reordered", "waits"),
    [
        ((), (Numerics.BITWISE,), Reordered.NEW_REQUESTS, False),
        ((), (Numerics.REORDERED,), Reordered.AT_ONCE, False),
        ((), (Numerics.REORDERED,), Reordered.NEW_REQUESTS, True),
        ((), (Numerics.LOSSY,), Reordered.AT_ONCE, True),
        ((Numerics.LOSSY,), (), Reordered.AT_ONCE, True),
        ((Numerics.LOSSY,), (Numerics.LOSSY, Numerics.REORDERED), Reordered.AT_ONCE, False),
        ((Numerics.REORDERED,), (Numerics.REORDERED,), Reordered.NEW_REQUESTS, False),
    ],
)
def test_when_a_change_may_come(
    now: tuple[Numerics, ...], goal: tuple[Numerics, ...], reordered: Reordered, waits: bool
) -> None:
    def revision(classes: tuple[Numerics, ...]) -> Revision:
        return Revision(revision="r", kernels=tuple(_of(f"{each}", each) for each in classes))

    assert (waits_for(revision(now), revision(goal), reordered) is not None) is waits


def test_numerics_are_named_by_the_lossy_kernels_alone() -> None:
    lossy, other = _of("a", Numerics.LOSSY), _of("b", Numerics.REORDERED)
    assert identity(Revision(revision="r", kernels=(other,))) is None
    named = identity(Revision(revision="r", kernels=(lossy, other)))
    assert named is not None
    assert named == identity(Revision(revision="s", kernels=(lossy,)))
    assert named != identity(Revision(revision="t", kernels=(_of("c", Numerics.LOSSY),)))


def test_what_was_signed_before_the_policy_was_there_stays_valid() -> None:
    state = _state(1)
    assert b'"reordered":' not in state.signed_content()
    strict = state.model_copy(update={"reordered": Reordered.NEW_REQUESTS})
    assert b"new-requests" in strict.signed_content()
