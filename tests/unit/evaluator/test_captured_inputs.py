"""Inputs that workers captured are among what a candidate is judged on; files are believed nothing."""

import datetime as dt
import random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from polymorph.bus import topology
from polymorph.bus.memory import InMemoryBus
from polymorph.config.clock import SystemClock
from polymorph.evaluator.adapters.captures import BadInputs, read
from polymorph.evaluator.adapters.inputs import LiveInputs, fitting, named
from polymorph.evaluator.domain.captured import TRIED, Captured, tried
from polymorph.evaluator.domain.operation import operation
from polymorph.evaluator.gates.micro import with_real
from polymorph.events.state import EMPTY, CapturedWorkload
from polymorph.events.types import EvaluateCandidate
from polymorph.events.values import Gate
from polymorph.kernels.schema import CapturedFile, Workload
from polymorph.workloads import shelf

K = 8
GEMM = operation(f"gemm_n16_k{K}_f32")
FUSED = operation(f"fused_add_rms_norm_h{K}_f32")
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def file(m: int = 4, **tensors: torch.Tensor) -> bytes:
    return save(tensors or {"x": torch.arange(m * K, dtype=torch.float32).reshape(m, K)})


def order(**changes: Any) -> EvaluateCandidate:
    known = {
        "pool": "p", "search_id": "s", "candidate_id": "c", "evaluation_id": "e", "hardware": "h", "solution": "",
        "definition": GEMM.definition.name, "workload": "of-the-order", "incumbent": EMPTY,
        "until": Gate.G2_CORRECT, "min_m": 1, "max_m": 8,
    }  # fmt: skip
    return EvaluateCandidate.model_validate(known | changes)


def captures(*files: CapturedFile, privacy: str = "captured") -> Workload:
    extension = {"captures": files, "privacy": privacy}
    return Workload.model_validate({"uuid": "w", "axes": {"M": 1}, "inputs": {}, "x_polymorph": extension})


def test_what_was_captured_is_read_as_the_definition_names_it() -> None:
    x, residual = torch.randn(3, K), torch.randn(3, K)
    found = read(file(x=x, residual=residual, weight=torch.ones(K), eps=torch.ones(1)), FUSED)
    assert sorted(found) == ["residual", "x"]
    np.testing.assert_array_equal(found["residual"], residual.numpy())
    short = operation(f"gemm_n16_k{K}_bf16")
    np.testing.assert_array_equal(read(file(x=x.bfloat16()), short)["x"], x.bfloat16().float().numpy())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no safetensors file"),
        (b"\xff" * 64, "no safetensors file"),
        (file()[:-4], "does not lie at"),
        (file(y=torch.zeros(2, K)), "holds y, and not x"),
        (file(x=torch.zeros(2, K, dtype=torch.float64)), "x is F64: gemm_n16_k8_f32 takes float32"),
        (file(x=torch.zeros(2, K + 1)), r"shape \[2, 9\]: gemm_n16_k8_f32 takes \[M, 8\]"),
        (file(x=torch.zeros(K)), r"shape \[8\]"),
        (file(x=torch.zeros(0, K)), r"shape \[0, 8\]"),
        (file(x=torch.full((2, K), torch.nan)), "not finite"),
        (file(x=torch.full((2, K), 1e30)), "beyond 1e"),
    ],
)
def test_a_bad_file_is_an_error_with_its_reason(content: bytes, reason: str) -> None:
    with pytest.raises(BadInputs, match=reason):
        read(content, GEMM)


def test_rows_that_differ_are_refused() -> None:
    with pytest.raises(BadInputs, match="x has 2, residual has 3"):
        read(file(x=torch.zeros(2, K), residual=torch.zeros(3, K)), FUSED)


def test_whatever_is_changed_in_a_file_nothing_but_a_reason_comes_of_it() -> None:
    whole = file(x=torch.randn(2, K), residual=torch.randn(2, K))
    drawn = random.Random(1)
    for _ in range(3000):
        changed = bytearray(whole)
        for _ in range(drawn.randint(1, 4)):
            changed[drawn.randrange(220)] = drawn.randrange(256)
        try:
            found = read(bytes(changed[: drawn.choice((len(whole), drawn.randrange(len(whole))))]), FUSED)
        except BadInputs:
            continue
        assert {value.shape for value in found.values()} <= {(2, K)}


def test_calls_within_the_range_come_first_and_the_latest_of_them() -> None:
    files = tuple(CapturedFile(m=m, path=str(at)) for at, m in enumerate((1, 64, 4, 8, 200)))
    assert [each.m for each in fitting(files, 4, 8)] == [8, 4, 200, 64]


def test_a_workload_of_other_makers_names_its_inputs_alone() -> None:
    inputs = {
        "x": {"type": "safetensors", "path": "a" * 64, "tensor_key": "x"},
        "weight": {"type": "random"},
    }
    workload = Workload(uuid="w", axes={"M": 3}, inputs=inputs)
    assert named(workload) == (CapturedFile(m=3, path="a" * 64),)


def test_a_candidate_is_tried_on_few_calls_of_each_source() -> None:
    calls = [Captured({"x": np.ones((m, K), np.float32)}, "captured") for m in (2, 8, 8, 8, 8)]
    own = [Captured({"x": np.ones((8, K), np.float32)}, "own-engine")]
    assert [name for name, _ in tried([*calls, *own], 4)] == [
        *(f"captured-{index}" for index in range(TRIED)),
        "own-engine-0",
    ]
    assert calls[1].rows(3)["x"].shape == (3, K)


class Shelf:
    """A bus with workloads on it."""

    def __init__(self) -> None:
        self.bus = InMemoryBus("/test", SystemClock())

    async def stand(self, *contents: bytes, hours: int = 0, **about: Any) -> str:
        files = [
            CapturedFile(m=4, path=await self.bus.put_object(content, store=topology.CAPTURES))
            for content in contents
        ]
        digest = await self.bus.put_object(captures(*files).canonical(), store=topology.CAPTURES)
        known = {
            "pool": "p", "definition": GEMM.definition.name, "workload": digest, "worker_id": "w", "model": "m",
            "m": [4] * len(files), "signature": "4", "size": 1, "weight": 1.0,
            "captured_at": NOW + dt.timedelta(hours=hours), "expires_at": NOW + dt.timedelta(days=1),
        }  # fmt: skip
        await shelf.put(self.bus, CapturedWorkload.model_validate(known | about))
        return digest


NOTHING = Workload(uuid="w", axes={"M": 1}, inputs={})


async def test_what_stands_for_the_pool_is_taken_the_latest_first() -> None:
    held = Shelf()
    old = await held.stand(file(1), file(2), hours=1)
    new = await held.stand(file(3), file(4), hours=2)
    await held.stand(file(5), pool="another")
    await held.stand(file(6), definition="gemm_n9_k9_f32")
    await held.stand(file(1), hours=3, m=[1])
    given = await LiveInputs(held.bus).of(order(min_m=2), NOTHING)
    assert (given.workloads, given.left_out) == ([new, old], {})
    assert [(call.m, call.source) for call in given.calls] == [
        (4, "captured"),
        (3, "captured"),
        (2, "captured"),
    ]


async def test_what_cannot_be_read_of_the_pools_is_left_out_with_its_reason() -> None:
    held = Shelf()
    good = await held.stand(file(4))
    bad = await held.stand(file(x=torch.zeros(4, K + 1)), hours=1)
    gone = await held.stand(file(3), hours=2, workload="0" * 64)
    assert gone != "0" * 64
    given = await LiveInputs(held.bus).of(order(), NOTHING)
    assert given.workloads == [good]
    assert "takes [M, 8]" in given.left_out[bad]
    assert "it has expired, or was never there" in given.left_out["0" * 64]


async def test_what_the_order_itself_names_is_an_error_where_it_cannot_be_read() -> None:
    bus = InMemoryBus("/test", SystemClock())
    path = await bus.put_object(file(4), store=topology.CAPTURES)
    given = await LiveInputs(bus).of(order(), captures(CapturedFile(m=4, path=path)))
    assert (given.workloads, len(given.calls)) == (["of-the-order"], 1)
    own = await bus.put_object(file(4))
    given = await LiveInputs(bus).of(order(), captures(CapturedFile(m=4, path=own), privacy="own-engine"))
    assert given.calls[0].source == "own-engine"
    for wrong, reason in (("0" * 64, "has expired"), ("../../etc/passwd", "no object's name")):
        with pytest.raises(BadInputs, match=reason):
            await LiveInputs(bus).of(order(), captures(CapturedFile(m=4, path=wrong)))
    large = await bus.put_object(b"\0" * ((16 << 20) + 1), store=topology.CAPTURES)
    with pytest.raises(BadInputs, match="bytes, 16777216 are taken"):
        await LiveInputs(bus).of(order(), captures(CapturedFile(m=4, path=large)))


async def test_a_bus_without_the_list_is_no_reason_to_judge_nothing() -> None:
    bus = InMemoryBus("/test", SystemClock())
    bus.world.available = False
    given = await LiveInputs(bus).of(order(), NOTHING)
    assert given.calls == []
    assert "pool" in given.left_out


def test_timed_calls_hold_real_values_and_no_two_of_them_are_equal() -> None:
    rng = np.random.default_rng(1)
    bank = rng.standard_normal(1 << 12, dtype=np.float32)
    drawn = bank.copy()
    real = np.where(np.arange(64) % 8 == 0, 1000, 0.001).astype(np.float32).reshape(2, 32)
    assert with_real(bank, [real], rng) == 0.5
    np.testing.assert_array_equal(bank[1 << 11 :], drawn[1 << 11 :])
    pieces = bank[: 1 << 11].reshape(-1, 64)
    assert np.count_nonzero(pieces > 400, axis=1).tolist() == [8] * len(pieces)
    assert len({piece.tobytes() for piece in pieces}) == len(pieces)
    assert with_real(drawn, [], rng) == 0.0
