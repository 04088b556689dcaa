"""The benchmark of hot loading counts a swap only where its read-back shows that the new kernel served."""

from typing import Any

import pytest
from benchmarks.hotload.agreement import Agreement
from benchmarks.hotload.house import Failed
from benchmarks.hotload.streams import Answer, p99
from benchmarks.hotload.swaps import Swapping

from polymorph.events.values import KernelBinding, Numerics

GEMM, NORM = "gemm_n16_k16_f32", "rms_norm_h16_f32"


def kernel(definition: str, letter: str) -> KernelBinding:
    return KernelBinding(
        definition=definition, min_m=1, max_m=8, manifest="f" * 64, artifact=letter * 64,
        numerics=Numerics.REORDERED,
    )  # fmt: skip


KERNELS = {
    GEMM: (kernel(GEMM, "a"), kernel(GEMM, "b")),
    NORM: (kernel(NORM, "c"), kernel(NORM, "d")),
}


class Worker:
    """Engages what it is told but `refused`; all that it has serves but `silent`."""

    def __init__(self, refused: str = "", silent: str = "") -> None:
        self.refused, self.silent = refused, silent
        self.runs: set[str] = set()

    async def promote(self, kernels: tuple[KernelBinding, ...]) -> dict[str, object]:
        wanted = {each.artifact[0] for each in kernels}
        if self.refused in wanted and self.refused:
            raise Failed("refused: self-test")
        assert wanted != self.runs, "a swap is a change"
        self.runs = wanted
        return {
            "served": {each.artifact: each.artifact[0] != self.silent for each in kernels},
            "paused_s": 0.1,
        }


async def swapped(worker: Any, count: int = 8) -> tuple[Any, Any]:
    swapping = Swapping(worker, lambda text: None)
    first = await swapping.first_loads(KERNELS)
    return first, await swapping.blocks(KERNELS, count, 3)


async def test_each_swap_changes_one_kernel_and_blocks_have_an_equal_rest() -> None:
    first, swaps = await swapped(Worker())
    assert (first.done, first.failed, swaps.done, swaps.failed) == (4, 0, 8, 0)
    assert len(swaps.artifacts) == 4
    assert swaps.operations == {"gemm", "rmsnorm"}
    for (begun, middle), (again, ended) in swaps.blocks:
        assert middle == again
        assert ended - middle >= middle - begun
    assert len(swaps.blocks) == 3


async def test_a_refused_kernel_is_told_and_what_ran_goes_on() -> None:
    worker = Worker(refused="b")
    first, swaps = await swapped(worker)
    assert first.failed == 1
    assert "self-test" in first.reasons[0]
    assert "a" in worker.runs
    assert swaps.done + swaps.failed == swaps.tried == 8


async def test_what_is_engaged_and_serves_nothing_is_no_swap() -> None:
    first, swaps = await swapped(Worker(silent="d"))
    assert first.failed == 1
    assert "served nothing" in first.reasons[0]
    assert "d" * 64 not in swaps.artifacts


def answer(prompt: int, text: str, *pieces: float, whole: bool = True) -> Answer:
    return Answer(prompt, text, ok=True, whole=whole, began=pieces[0], pieces=list(pieces))


def test_gaps_count_where_they_end() -> None:
    steady = answer(0, "", *(number / 10 for number in range(11)))
    slow = answer(1, "", 0.0, 0.45)
    assert p99([steady, slow], (0.0, 0.3)) == pytest.approx(0.1)
    assert p99([steady, slow], (0.0, 1.0)) == pytest.approx(0.45)


def test_agreement_is_with_what_most_calm_streams_said() -> None:
    calm = [answer(0, "x", 0.0), answer(0, "x", 1.0), answer(0, "y", 2.0), answer(1, "z", 0.0)]
    agreement = Agreement(calm)
    assert agreement.incumbent == 0.75
    assert agreement.of([answer(0, "x", 3.0), answer(1, "x", 3.0), answer(7, "q", 3.0)]) == 0.5
    with pytest.raises(ValueError, match="let streams run longer"):
        agreement.of([answer(7, "q", 3.0)])
