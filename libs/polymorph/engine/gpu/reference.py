"""What each operation shall compute, in float64, and how far a result may lie from it.

The definitions of `polymorph.kernels.definitions` say the same in the words that are hashed and signed, and a test holds
both together; these need torch alone.
"""

from typing import Any

import torch

Bound = tuple[Any, Any]
"""The exact result, and how far from it each element may lie."""

EPS = 1e-6
_ACCUMULATION = 2.0**-18
"""Of the sum of absolute products: float32 sums in any order stay far below it at the widths of models."""


def inputs(
    operation: str, sizes: tuple[int, ...], m: int, dtype: Any, device: Any, seed: int
) -> tuple[Any, ...]:
    """Seeded arguments of a slot's operator, with a row of zeros and large values among them."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + m)

    def drawn(*shape: int, scale: float = 1.0) -> Any:
        return (torch.randn(shape, generator=generator) * scale).to(device=device, dtype=dtype)

    wide = sizes[0] * 2 if operation == "silu_and_mul" else sizes[-1]
    x = drawn(m, wide)
    x[0, ::7] *= 16.0
    if m > 1:
        x[-1] = 0.0
    match operation:
        case "rms_norm":
            return x, drawn(sizes[0]), EPS
        case "fused_add_rms_norm":
            return x, drawn(m, sizes[0], scale=4.0), drawn(sizes[0]), EPS
        case "silu_and_mul":
            return (x,)
        case _:
            bias = drawn(sizes[0]) if seed % 2 else None
            return x, drawn(*sizes, scale=sizes[1] ** -0.5), bias


def bounds(operation: str, arguments: tuple[Any, ...]) -> list[Bound]:
    """Exact results of an operator on these arguments, each with its tolerance by element."""
    given = [one.double() if torch.is_tensor(one) else one for one in arguments]
    match operation:
        case "rms_norm":
            x, weight, eps = given
            exact, sizes = _normed(x, weight, eps)
            results = [(exact, sizes)]
        case "fused_add_rms_norm":
            x, residual, weight, eps = given
            exact, sizes = _normed(x + residual, weight, eps)
            results = [(exact, sizes), (x + residual, x.abs() + residual.abs())]
        case "silu_and_mul":
            gate, up = given[0].chunk(2, dim=-1)
            exact = gate * torch.sigmoid(gate) * up
            # An exponential loses as much as its argument is large, and below the smallest float32 it is zero.
            flushed = (gate * up).abs() * (torch.finfo(torch.float32).tiny / _ACCUMULATION)
            results = [(exact, exact.abs() * (1 + gate.abs() / 16) + flushed)]
        case _:
            x, weight, bias = given
            exact = torch.nn.functional.linear(x, weight, bias)
            results = [(exact, torch.nn.functional.linear(x.abs(), weight.abs()) + exact.abs())]
    kind = torch.finfo(arguments[0].dtype)
    # Below the smallest normal number a device may round to its spacing, or to zero.
    floor = torch.finfo(torch.float32).tiny + kind.smallest_normal * kind.eps
    return [(exact, exact.abs() * kind.eps + size * _ACCUMULATION + floor) for exact, size in results]


def worst(results: Any, expected: list[Bound]) -> float:
    """How much of the tolerance the worst element uses: above 1 the result is wrong; a NaN is infinitely wrong."""
    found = results if isinstance(results, tuple) else (results,)
    if len(found) != len(expected):
        return float("inf")
    used = 0.0
    for result, (exact, tolerance) in zip(found, expected, strict=True):
        if result.shape != exact.shape:
            return float("inf")
        share = (result.double() - exact).abs() / tolerance
        used = max(used, float(torch.nan_to_num(share, nan=float("inf"), posinf=float("inf")).max()))
    return used


def _normed(h: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    exact = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight
    return exact, exact.abs()
