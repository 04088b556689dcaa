"""Run by test_norm_slots.py in a process of its own: importing the extension changes vLLM for good."""

import json
import sys

import torch
from vllm.config.kernel import IrOpPriorityConfig
from vllm.platforms import current_platform


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def main(library: str) -> None:
    current_platform.import_kernels()
    from vllm import ir

    from polymorph.engine.extension import PolymorphExtension

    native = ["native"]
    IrOpPriorityConfig(rms_norm=native, fused_add_rms_norm=native, gelu_and_mul_sparse=native).set_default()
    slots = PolymorphExtension()
    x, residual, weight = torch.randn(5, 64), torch.randn(5, 64), torch.randn(64)
    kept = x.clone()
    for _ in ("native", "kernel"):
        torch.testing.assert_close(ir.ops.rms_norm(x, weight, 1e-5), expected(x, weight))
        y, carried = ir.ops.fused_add_rms_norm(x, residual, weight, 1e-5)
        torch.testing.assert_close(y, expected(x + residual, weight))
        torch.testing.assert_close(carried, x + residual)
        assert torch.equal(x, kept)
        names = slots.slots_describe()["definitions"]
        answer = slots.slots_engage(
            [
                {"definition": name, "min_m": 1, "max_m": 1 << 30, "path": library, "artifact": "norm"}
                for name in names
            ]
        )
        assert answer["ok"], answer
    print(json.dumps(slots.slots_read()))


if __name__ == "__main__":
    main(sys.argv[1])
