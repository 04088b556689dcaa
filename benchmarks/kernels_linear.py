"""Linear kernels of the pattern agent against vLLM's own path (oneDNN, weights prepacked), on one model's shapes.

Each call meets the weight of another layer, as in a model, so that no weight stays in the cache. The best candidate of
a first look is measured once more, interleaved with vLLM's own, on other inputs: that figure is the one reported.

    python benchmarks/kernels_linear.py [--threads 2] [--rounds 4]

Prints a table, and one JSON line last.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

SHAPES = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "lm_head": (49152, 576),
}
LAYERS = 30
TOKENS = (1, 2, 4, 8, 16, 32)
LIBRARY = Path(sys.prefix) / "lib" / "libiomp5.so"
ENVIRONMENT = {
    "KMP_BLOCKTIME": "1",
    "KMP_TPAUSE": "0",
    "OMP_PLACES": "cores",
    "OMP_PROC_BIND": "close",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

Call = Callable[[], Any]


def start_as_an_engine_would() -> None:
    """Starts this script again with Intel's OpenMP, as a careful engineer starts vLLM."""
    if LIBRARY.exists() and str(LIBRARY) not in os.environ.get("LD_PRELOAD", ""):
        environment = os.environ | ENVIRONMENT | {"LD_PRELOAD": str(LIBRARY)}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)  # noqa: S606


@dataclass
class Layers:
    """The weights of one linear layer in every layer of the model, vLLM's packing and ours."""

    n: int
    k: int
    count: int
    weights: list[Any] = field(default_factory=list)
    handlers: list[Any] = field(default_factory=list)
    packed: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import torch  # noqa: PLC0415 - after the environment is set
        from vllm import _custom_ops  # noqa: PLC0415

        self.weights = [torch.randn(self.n, self.k).bfloat16().float() for _ in range(self.count)]
        self.handlers = [_custom_ops.create_onednn_mm(weight.t(), 32) for weight in self.weights]

    def native(self, m: int) -> list[Call]:
        import torch  # noqa: PLC0415

        x, y = torch.randn(m, self.k), torch.empty(m, self.n)
        run = torch.ops._C.onednn_mm  # noqa: SLF001 - what vLLM calls

        def call(handle: Any) -> Call:
            return lambda: run(y, x, None, handle)

        return [call(handler.handler_tensor) for handler in self.handlers]

    def kernel(self, kernel: Any, layout: str, context: int, m: int) -> list[Call]:
        """Calls of a kernel over all layers, whose last result was checked against float64."""
        import torch  # noqa: PLC0415

        from polymorph.kernels.load import Buffer, Tensor  # noqa: PLC0415

        if layout not in self.packed:
            buffers = [Buffer(kernel.pack_bytes(tensor(self.weights[0]))) for _ in self.weights]
            for weight, buffer in zip(self.weights, buffers, strict=True):
                if kernel.pack(context, tensor(weight), buffer.address) != 0:
                    raise RuntimeError("the kernel refused to pack a weight")
            self.packed[layout] = buffers
        x, y = torch.randn(m, self.k), torch.full((m, self.n), float("nan"))
        self.packed["kept"] = [*self.packed.get("kept", []), x, y]
        calls: list[Call] = [
            kernel.call(context, [tensor(x), Tensor.packed(b.address, b.size), Tensor.absent()], [tensor(y)])
            for b in self.packed[layout]
        ]
        calls[-1]()
        error = (y.double() - x.double() @ self.weights[-1].double().T).abs().max().item()
        if not error < 1e-3:
            raise RuntimeError(f"the kernel is wrong by {error}")
        return calls


def tensor(value: Any) -> Any:
    from polymorph.kernels.load import DtypeCode, Tensor  # noqa: PLC0415

    code = DtypeCode[str(value.dtype).removeprefix("torch.")]
    return Tensor.at(value.data_ptr(), tuple(value.shape), code, value.stride())


def candidates(n: int, k: int, m: int, isa: Any) -> list[Any]:
    """What the agent proposes first, from the patterns that did well on other machines and shapes."""
    from polymorph.compiler.domain.agents.linear import LinearPattern  # noqa: PLC0415
    from polymorph.compiler.domain.agents.proposer import propose_for  # noqa: PLC0415
    from polymorph.kernels.definitions import linear_definition  # noqa: PLC0415
    from polymorph.kernels.isa import LANES  # noqa: PLC0415

    one = LinearPattern(isa=isa, lanes=LANES[isa], panel=2 * LANES[isa], rows=1, sums=8)
    few = replace(one, panel=3 * LANES[isa], rows=min(m, 4), sums=4)
    many = replace(one, rows=4, sums=4, storage="float32")
    if m == 1:
        chosen = [one, replace(one, sums=4), replace(one, unroll=4), replace(one, prefetch=4096)]
    elif m <= 8:
        chosen = [few, replace(few, panel=2 * LANES[isa], rows=min(m, 6)), replace(few, prefetch=0)]
    else:
        chosen = [many, replace(many, rows=5), replace(many, storage="pairs", widen_once=True), few]
    seeds = [pattern.params() for pattern in chosen]
    proposer = propose_for(
        linear_definition(n, k, "float32"), m, m, isa, rng=Random(0), seeds=seeds, batch=len(seeds)
    )
    return [] if proposer is None else proposer.next([])


def built(solutions: Sequence[Any], folder: Path) -> list[tuple[Any, str, str]]:
    """The loaded kernels, their layouts and what they are called."""
    from polymorph.compiler.domain.agents.sources import normalised_digest  # noqa: PLC0415
    from polymorph.kernels.build import build  # noqa: PLC0415
    from polymorph.kernels.layout import layout_digest  # noqa: PLC0415
    from polymorph.kernels.load import Kernel  # noqa: PLC0415
    from polymorph.kernels.toolchain import detect_toolchain, run_command  # noqa: PLC0415

    made = []
    for solution in solutions:
        place = folder / "benchmark" / normalised_digest(solution)[:16]
        library = place / "kernel.so"
        if not library.exists():
            build(solution, place, detect_toolchain(), run_command)
        params = solution.x_polymorph.params
        label = " ".join(
            [f"{params['storage']}-{params['panel']}x{params['rows']}"]
            + [f"{name}{params[name]}" for name in ("sums", "prefetch") if params[name] not in ("4", "512")]
            + [name for name in ("pack_x", "widen_once") if params[name] == "true"]
        )
        kernel = Kernel.from_content(library.read_bytes(), folder / "benchmark")
        made.append((kernel, layout_digest(solution) or "", label))
    return made


def seconds(calls: Sequence[Call]) -> float:
    """Of one call, over a pass through all layers."""
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / len(calls)


def compared(arms: Sequence[Sequence[Call]], rounds: int, rng: Random) -> list[list[float]]:
    """Seconds of every arm in every round, the arms of a round in random order."""
    for arm in arms:
        seconds(arm)
    times: list[list[float]] = [[] for _ in arms]
    for _ in range(rounds):
        for index in rng.sample(range(len(arms)), len(arms)):
            times[index].append(seconds(arms[index]))
    return times


def measured(
    layers: Layers, kernels: Sequence[tuple[Any, str, str]], m: int, context: int, rounds: int
) -> dict[str, Any]:
    """The native time and the confirmed best of ours."""
    rng = Random(m)
    first = compared(
        [layers.native(m), *(layers.kernel(k, lay, context, m) for k, lay, _ in kernels)], rounds, rng
    )
    best = min(range(len(kernels)), key=lambda i: statistics.median(first[i + 1]))
    kernel, layout, label = kernels[best]
    native, ours = compared(
        [layers.native(m), layers.kernel(kernel, layout, context, m)], 2 * rounds + 1, rng
    )
    ratios = [n / o for n, o in zip(native, ours, strict=True)]
    return {
        "m": m,
        "native_us": round(statistics.median(native) * 1e6, 1),
        "ours_us": round(statistics.median(ours) * 1e6, 1),
        "speedup": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "kernel": label,
        "candidates": len(kernels),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--build-only", action="store_true", help="compile the candidates and stop")
    options = parser.parse_args()
    start_as_an_engine_would()

    import torch  # noqa: PLC0415

    from polymorph.config.folders import cache_folder  # noqa: PLC0415
    from polymorph.kernels.host.pool import KernelHost  # noqa: PLC0415
    from polymorph.kernels.isa import detect_isa, hardware_fingerprint  # noqa: PLC0415

    torch.set_num_threads(options.threads)
    isa, rows = detect_isa(), []
    kernels = {
        (name, m): built(candidates(*SHAPES[name], m, isa), cache_folder())
        for name in options.shapes
        for m in TOKENS
    }
    if options.build_only:
        return
    with ExitStack() as stack:
        context = stack.enter_context(KernelHost.build().context(options.threads))
        for name in options.shapes:
            n, k = SHAPES[name]
            layers = Layers(n, k, 1 if name == "lm_head" else LAYERS)
            for m in TOKENS:
                row = {"layer": name, **measured(layers, kernels[name, m], m, context, options.rounds)}
                rows.append(row)
                print(
                    f"{name:8} {n:6}x{k:<5} M={m:<3} vLLM {row['native_us']:9.1f} us   ours {row['ours_us']:9.1f} us"
                    f"   {row['speedup']:5.2f}x (lowest {row['lowest']:.2f})   {row['kernel']}",
                    flush=True,
                )
    print(json.dumps({"benchmark": "kernels_linear", "hardware": hardware_fingerprint(), "rows": rows}))


if __name__ == "__main__":
    main()
