"""y = x @ weight.T (+ bias) for few rows: a program reads its rows of the weight once and serves all rows of x with them.

One row of x is a sum of products; more of them are a tile of at least 16 for the tensor cores.
"""

import triton
import triton.language as tl


@triton.jit
def one_row(y, x, weight, bias, N, K: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    at_n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BN, BK], dtype=tl.float32)
    for start in range(0, K, BK):
        at_k = start + tl.arange(0, BK)
        held = (at_n < N)[:, None] & (at_k < K)[None, :]
        w = tl.load(weight + at_n.to(tl.int64)[:, None] * K + at_k[None, :], mask=held, other=0.0)
        v = tl.load(x + at_k, mask=at_k < K, other=0.0)
        total += w.to(tl.float32) * v.to(tl.float32)[None, :]
    out = tl.sum(total, axis=1)
    if BIAS:
        out += tl.load(bias + at_n, mask=at_n < N, other=0.0).to(tl.float32)
    tl.store(y + at_n, out.to(y.dtype.element_ty), mask=at_n < N)


@triton.jit(do_not_specialize=["m"])
def few_rows(
    y,
    x,
    weight,
    bias,
    m,
    N,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    at_n = tl.program_id(0) * BN + tl.arange(0, BN)
    at_m = tl.program_id(1) * BM + tl.arange(0, BM)
    total = tl.zeros([BM, BN], dtype=tl.float32)
    for start in range(0, K, BK):
        at_k = start + tl.arange(0, BK)
        held = (at_m < m)[:, None] & (at_k < K)[None, :]
        v = tl.load(x + at_m[:, None] * K + at_k[None, :], mask=held, other=0.0)
        held = (at_n < N)[None, :] & (at_k < K)[:, None]
        w = tl.load(weight + at_n.to(tl.int64)[None, :] * K + at_k[:, None], mask=held, other=0.0)
        total = tl.dot(v, w, acc=total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + at_n, mask=at_n < N, other=0.0).to(tl.float32)[None, :]
    held = (at_m < m)[:, None] & (at_n < N)[None, :]
    tl.store(y + at_m.to(tl.int64)[:, None] * N + at_n[None, :], total.to(y.dtype.element_ty), mask=held)


def launch(y, x, weight, bias, scratch):
    n = weight.shape[0]
    k = weight.shape[1]
    m = x.numel() // k
    given = bias is not None
    # Where there is no bias, some pointer stands in its place and is never read.
    held = bias if given else weight
    if m == 1:
        one_row[(triton.cdiv(n, 4),)](y, x, weight, held, n, K=k, BIAS=given, BN=4, BK=512, num_warps=4)
    else:
        grid = (triton.cdiv(n, 32), triton.cdiv(m, 16))
        few_rows[grid](
            y, x, weight, held, m, n, K=k, BIAS=given, BM=16, BN=32, BK=64, num_warps=4, num_stages=4
        )
