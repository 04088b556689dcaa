"""Inputs that a correct kernel takes in its stride and a tuned-to-the-test one does not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polymorph.evaluator.domain.number import Floats, exact_in_bfloat16
from polymorph.evaluator.domain.operation import Operation
from polymorph.kernels.buckets import UPPER_BOUNDS

# Work and rows of the largest call that is tried; what was not tried is not signed.
_MOST_FLOPS = 5e10
_MOST_ROWS = 8192
Indices = npt.NDArray[np.int64]
_MOST_WEIGHTS = 2.5e6
_MOST_PRODUCTS = 3e8
_KINDS = ("normal", "signs", "mixed", "large", "small", "one-hot", "cancel", "position", "zeros")


@dataclass(frozen=True, slots=True)
class Case:
    """One call. `end` puts each tensor's last byte before a forbidden page, else its first byte behind one.

    `may_refuse`: the contract lets a kernel return non-zero, and the caller runs its native code.
    """

    name: str
    m: int
    kind: str
    end: bool = True
    row_gap: int = 0
    bias: bool = False
    may_refuse: bool = False


def largest_tried(op: Operation, max_m: int) -> int:
    """The largest M of the range that is tried, hence the largest that may be signed: `max_m`, or a bucket's end."""
    affordable = min(_MOST_ROWS, int(_MOST_FLOPS / op.flops(1)))
    if max_m <= affordable:
        return max_m
    return max(upper for upper in UPPER_BOUNDS if upper <= max(1, affordable))


def plan(op: Operation, min_m: int, max_m: int, typical: int, rng: np.random.Generator) -> list[Case]:
    """Boundary, typical, ragged and random M within the range, with every kind of content among them."""
    most = largest_tried(op, max_m)
    least = min(min_m, most)
    inside = [m for m in (3, 5, 7, 13, 17, 31, 67, 131) if least < m < most]
    ragged = [int(m) for m in rng.permutation(inside)[:3]]
    drawn = int(rng.integers(least, most + 1))
    sizes = [least, most, min(max(typical, least), most), min(least + 1, most), *ragged, drawn]
    order = [_KINDS[0], *(str(kind) for kind in rng.permutation(_KINDS[1:]))]
    small = min(sizes)
    cases = [
        Case(f"m{m}-{kind}", m, kind, end=bool(rng.integers(2)) or index < 3)
        for index, (m, kind) in enumerate(_pairs(sizes, order, small))
    ]
    cases.append(Case(f"m{small}-start", small, "normal", end=False))
    cases.append(
        Case(f"m{max(small, 2)}-rows-apart", min(max(small, 2), most), "normal", row_gap=5, may_refuse=True)
    )
    if "bias" in op.definition.inputs:
        cases.append(Case(f"m{small}-bias", small, "normal", bias=True, may_refuse=True))
    return cases


def _pairs(sizes: Sequence[int], kinds: Sequence[str], small: int) -> list[tuple[int, str]]:
    """Every size and every kind at least once; what is left over goes to the smallest size."""
    pairs = [(m, kinds[index % len(kinds)]) for index, m in enumerate(dict.fromkeys(sizes))]
    seen = {kind for _, kind in pairs}
    return [*pairs, *((small, kind) for kind in kinds if kind not in seen)]


def rows(kind: str, m: int, width: int, rng: np.random.Generator) -> Floats:
    """Activations of one kind, float32.

    Raises:
        KeyError: there is no such kind.
    """
    normal: Floats = rng.standard_normal((m, width), dtype=np.float32)
    return np.ascontiguousarray(_MAKERS[kind](normal, rng), dtype=np.float32)


def _mixed(normal: Floats, rng: np.random.Generator) -> Floats:
    return normal * np.exp2(rng.integers(-12, 12, normal.shape)).astype(np.float32)


def _position(normal: Floats, _: np.random.Generator) -> Floats:
    return np.linspace(-1, 1, normal.size).astype(np.float32).reshape(normal.shape)


def _one_hot(normal: Floats, rng: np.random.Generator) -> Floats:
    hot = np.zeros_like(normal)
    hot[np.arange(len(hot)), rng.integers(0, hot.shape[1], len(hot))] = normal[:, 0] + np.float32(3)
    return hot


def _cancel(normal: Floats, _: np.random.Generator) -> Floats:
    half = normal.shape[1] // 2
    normal[:, half : 2 * half] = -normal[:, :half] * np.float32(1.0009765625)
    return normal


_MAKERS: dict[str, Callable[[Floats, np.random.Generator], Floats]] = {
    "normal": lambda normal, _: normal,
    "zeros": lambda normal, _: np.zeros_like(normal),
    "signs": lambda normal, _: np.sign(normal),
    "large": lambda normal, _: normal * np.float32(4096),
    "small": lambda normal, _: normal * np.float32(2.0**-40),
    "mixed": _mixed,
    "position": _position,
    "one-hot": _one_hot,
    "cancel": _cancel,
}


def weights(op: Operation, rng: np.random.Generator) -> Floats:
    """A weight whose values bfloat16 holds exactly, with rows that are empty, large, tiny and single."""
    shape = op.weight_shape()
    if op.kind != "gemm":
        scale = rng.standard_normal(shape, dtype=np.float32) / np.float32(8)
        return exact_in_bfloat16(np.float32(1) + scale)
    weight = rng.standard_normal(shape, dtype=np.float32)
    weight *= np.float32(op.depth**-0.5)
    odd = rng.permutation(op.columns)[:4]
    weight[odd[0]] = 0
    if len(odd) == 4:
        weight[odd[1]] *= 1024
        weight[odd[2]] *= np.float32(2.0**-20)
        weight[odd[3]] = 0
        weight[odd[3], rng.integers(op.depth)] = 1
    return exact_in_bfloat16(weight)


def spoiled(weight: Floats, rng: np.random.Generator) -> tuple[Floats, int, int]:
    """The weight with one value, at a secret place, that bfloat16 does not hold."""
    row, column = (int(rng.integers(size)) for size in weight.shape)
    copy = weight.copy()
    copy[row, column] = np.float32(1.0009765625)
    return copy, row, column


def checked_columns(op: Operation, m: int, rng: np.random.Generator) -> Indices:
    """All columns where a float64 reference is affordable, else a secret draw with both ends."""
    count = min(op.columns, int(_MOST_WEIGHTS / op.depth), int(_MOST_PRODUCTS / (m * op.depth)))
    if op.kind != "gemm" or count >= op.columns:
        return np.arange(op.columns, dtype=np.int64)
    ends = np.concatenate([np.arange(32), np.arange(op.columns - 32, op.columns)])
    return np.unique(np.concatenate([ends, rng.choice(op.columns, max(count, 64))])).astype(np.int64)
