"""y = x @ weight.T (+ bias) for few rows: K is split over programs that leave float32 parts in scratch, then added up.

The parts are added in their order, without atomics: the same input gives the same bits in every run.
"""

import triton
import triton.language as tl

SPLITS = 4
BK = 64


@triton.jit(do_not_specialize=["m"])
def parts(
    scratch,
    x,
    weight,
    m,
    N,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    split = tl.program_id(2)
    at_n = tl.program_id(0) * BN + tl.arange(0, BN)
    at_m = tl.program_id(1) * BM + tl.arange(0, BM)
    total = tl.zeros([BM, BN], dtype=tl.float32)
    for step in range(0, SPAN, BK):
        at_k = split * SPAN + step + tl.arange(0, BK)
        held = (at_m < m)[:, None] & (at_k < K)[None, :]
        v = tl.load(x + at_m[:, None] * K + at_k[None, :], mask=held, other=0.0)
        held = (at_n < N)[None, :] & (at_k < K)[:, None]
        w = tl.load(weight + at_n.to(tl.int64)[None, :] * K + at_k[:, None], mask=held, other=0.0)
        total = tl.dot(v, w, acc=total, input_precision="ieee")
    held = (at_m < m)[:, None] & (at_n < N)[None, :]
    row = split.to(tl.int64) * m + at_m
    tl.store(scratch + row[:, None] * N + at_n[None, :], total, mask=held)


@triton.jit(do_not_specialize=["m", "size"])
def added(y, scratch, bias, m, size, N, BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = at < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(scratch + split * size + at, mask=held, other=0.0)
    if BIAS:
        total += tl.load(bias + at % N, mask=held, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=held)


def scratch_floats(m, n, k):
    return SPLITS * m * n


def launch(y, x, weight, bias, scratch):
    n = weight.shape[0]
    k = weight.shape[1]
    m = x.numel() // k
    span = triton.cdiv(triton.cdiv(k, SPLITS), BK) * BK
    grid = (triton.cdiv(n, 32), triton.cdiv(m, 16), SPLITS)
    parts[grid](scratch, x, weight, m, n, K=k, SPAN=span, BM=16, BN=32, BK=BK, num_warps=4, num_stages=3)
    given = bias is not None
    held = bias if given else weight
    size = m * n
    added[(triton.cdiv(size, 512),)](
        y, scratch, held, m, size, n, BIAS=given, SPLITS=SPLITS, BLOCK=512, num_warps=4
    )
