"""Operations of the benchmark models: vLLM's native code against kernels of ours, behind the same slots.

    python -m benchmarks.operations [--op NAME ...] [--models NAME ...] [--rounds 5]

Prints a table, and one JSON line last. QUICK=1 measures little of it.
"""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from random import Random

OPERATIONS = {
    "rms_norm": "norms",
    "fused_add_rms_norm": "norms",
    "silu_and_mul": "activation",
    "rotary": "rotary",
    "rotary_in_place": "rotary",
    "qk_norm_rotary": "rotary",
    "moe": "moe",
    "moe_skewed": "moe",
    "attn_decode": "attention",
    "top_k_top_p": "sampling",
}
"""Each with the module of this folder whose `cases(operation, shapes, tokens, slots)` yields its cases."""
MODELS = ("tiny-dense", "smollm2-135m-instruct", "tiny-moe", "bench-moe")
_STARTED = "POLYMORPH_BENCH_STARTED"


def start_as_an_engine_would(threads: int) -> None:
    """Starts this program again with the environment of an engine in its process: OpenMP, its threads bound to cores."""
    from polymorph.engine.launch import EngineLaunch  # noqa: PLC0415 - only the first process needs it

    if _STARTED not in os.environ:
        environment = EngineLaunch(model=Path("models/tiny-dense"), threads=threads).in_process_environment()
        environment |= {_STARTED: "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        arguments = [sys.executable, "-m", "benchmarks.operations", *sys.argv[1:]]
        os.execve(sys.executable, arguments, os.environ | environment)  # noqa: S606


def main() -> None:
    quick = bool(os.environ.get("QUICK"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--op", nargs="*", default=list(OPERATIONS), choices=list(OPERATIONS))
    parser.add_argument("--models", nargs="*", default=list(MODELS[:1] if quick else MODELS), choices=MODELS)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores of this process")
    parser.add_argument("--rounds", type=int, default=2 if quick else 5)
    options = parser.parse_args()
    start_as_an_engine_would(options.threads)

    from benchmarks.operations.models import TOKENS, Shapes  # noqa: PLC0415
    from benchmarks.operations.paired import compared  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415 - after the environment is set

    from polymorph.engine.dispatcher.ops import load  # noqa: PLC0415
    from polymorph.engine.packed import PackedWeights  # noqa: PLC0415
    from polymorph.engine.slots import Slots  # noqa: PLC0415
    from polymorph.engine.weights import WeightStore  # noqa: PLC0415
    from polymorph.kernels.catalogue.artifacts import artifacts  # noqa: PLC0415
    from polymorph.kernels.definitions import definition_named  # noqa: PLC0415
    from polymorph.kernels.isa import hardware_fingerprint  # noqa: PLC0415

    current_platform.import_kernels()
    slots = Slots(ops=load(), weights=WeightStore(1 << 33), packed=PackedWeights(1 << 33))
    tokens = (1, 32) if quick else TOKENS
    rows = []
    for operation in options.op:
        module = importlib.import_module(f"benchmarks.operations.{OPERATIONS[operation]}")
        for shapes in map(Shapes.read, options.models):
            for case in module.cases(operation, shapes, tokens, slots):
                kernels = artifacts(definition_named(case.definition))
                found = compared(slots, case, kernels, options.rounds, Random(case.m))
                rows.append(found.row())
                print(found.line(), flush=True)
    print(json.dumps({"benchmark": "operations", "hardware": hardware_fingerprint(), "rows": rows}))


if __name__ == "__main__":
    main()
