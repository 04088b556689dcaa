"""Triton kernels swapped in captured CUDA graphs under continuous replay, each output checked against torch.

For a machine with a GPU where torch and triton are, and nothing else of ours: no vLLM, no installation.

    python3 benchmarks/gpu_hotswap.py [--swaps 100] [--quick]

A block of a transformer (norm, linear, silu_and_mul, linear, norm) runs through the slots in bfloat16 and float16. One
thread serves requests of 1 to 64 tokens on two side streams; the main thread swaps kernels meanwhile, rolls back, and
tries what must be refused. Prints tables, and one JSON object last. Exits with 1 where an output was wrong, a kernel did
not run or a refusal did not come; with 2 where there is no CUDA device.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "libs"), str(ROOT)]

try:
    import torch
except ImportError:
    print("torch is not installed: this benchmark needs torch, triton and Python 3.11 or newer")
    sys.exit(2)
from benchmarks.gpu_block import BUCKETS, Block, Serving  # noqa: E402

from polymorph.engine.bindings import SlotBinding  # noqa: E402
from polymorph.engine.gpu import ops, selftest  # noqa: E402
from polymorph.engine.gpu.artifact import TritonKernel, TritonMissing, keep, load, toolchain  # noqa: E402
from polymorph.engine.gpu.captured import CaptureFailed  # noqa: E402
from polymorph.engine.gpu.counters import Counters  # noqa: E402
from polymorph.engine.gpu.device import GraphDevice  # noqa: E402
from polymorph.engine.gpu.graphs import Engaged, GraphSet  # noqa: E402
from polymorph.engine.gpu.slots import SlotTable, Table, definition_name  # noqa: E402

KERNELS = ROOT / "libs/polymorph/engine/gpu/kernels"
VARIANTS = {
    "first": ("rms_norm_row", "fused_add_rms_norm_row", "silu_and_mul_tiles", "linear_gemv"),
    "second": ("rms_norm_blocks", "fused_add_rms_norm_blocks", "silu_and_mul_flat", "linear_split_k"),
    "mixed": ("rms_norm_row", "fused_add_rms_norm_blocks", "silu_and_mul_tiles", "linear_split_k"),
}


@dataclass
class Bench:
    """One dtype: kernels tried and loaded, graphs, swaps."""

    block: Block
    folder: Path
    device: GraphDevice
    slots: SlotTable
    kernels: dict[str, TritonKernel] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        ops.serve(self.slots)
        self.graphs = GraphSet(self.device, self.slots, self.block.body, BUCKETS)

    def load(self) -> dict[str, float]:
        """Loads and tries every kernel for the shapes of the block; the share of its tolerance that each used."""
        used = {}
        for name in sorted({name for names in VARIANTS.values() for name in names}):
            operation = operation_of(name)
            kernel = load(keep((KERNELS / f"{name}.py").read_text(), self.folder), operation)
            for wanted, sizes in self.block.operations():
                if wanted == operation:
                    used[f"{name} {'x'.join(map(str, sizes))}"] = selftest.check(
                        kernel, self._case(kernel, sizes)
                    )
            self.kernels[name] = kernel
        return used

    def table(self, names: Sequence[str]) -> Table:
        kernels = [self.kernels[name] for name in names]
        bindings = [
            SlotBinding(
                definition_name(wanted, sizes, self.block.dtype),
                1,
                BUCKETS[-1],
                str(kernel.path),
                kernel.artifact,
            )
            for kernel in kernels
            for wanted, sizes in dict.fromkeys(self.block.operations())
            if wanted == kernel.operation
        ]
        return Table.of(bindings, {kernel.artifact: kernel for kernel in kernels}, self.slots.counters)

    def swap(self, table: Table) -> Engaged:
        """Engages while the other thread serves, and waits until every kernel was seen to run within a graph."""
        before = self.slots.counters.read()
        engaged = self.graphs.engage(table)
        self._see_it_run(table, before)
        return engaged

    def roll_back(self) -> None:
        engaged = self.graphs.rollback()
        self._see_it_run(self.slots.engaged, self.slots.counters.read())
        if engaged.way != "kept":
            self.problems.append(f"a rollback was {engaged.way}")

    def refuse(self) -> None:
        """What must not get through: a wrong kernel, one that faults, one that does not compile, one that breaks the
        capture. All of it while the other thread serves.
        """
        selftest.in_process(self._case(self.kernels["silu_and_mul_flat"], (self.block.inner,)))
        self._does_not_pass(self._changed("tl.sigmoid(gate)", "tl.sigmoid(up)"), selftest.check_case)
        self._does_not_pass(
            self._changed("row * 2 * D +", "row * 2 * D + 1099511627776 +"), selftest.in_process
        )
        vast = self._changed("BLOCK = 512", "BLOCK = 4194304")
        self._fails(vast, "a kernel that does not compile")
        self._fails(_synchronising(self.kernels["silu_and_mul_flat"]), "a kernel that waits for the device")

    def _changed(self, old: str, new: str) -> TritonKernel:
        source = (KERNELS / "silu_and_mul_flat.py").read_text()
        return load(keep(source.replace(old, new), self.folder), "silu_and_mul")

    def _does_not_pass(self, kernel: TritonKernel, test: Callable[[selftest.Case], float]) -> None:
        try:
            test(self._case(kernel, (self.block.inner,)))
            self.problems.append("a self-test passed a wrong kernel")
        except selftest.SelfTestFailed as error:
            print(f"  refused as it should be: {str(error)[:100]}")

    def _fails(self, kernel: TritonKernel, what: str) -> None:
        before = self.slots.engaged
        definition = definition_name("silu_and_mul", (self.block.inner,), self.block.dtype)
        binding = SlotBinding(definition, 1, BUCKETS[-1], str(kernel.path), kernel.artifact)
        try:
            self.graphs.engage(Table.of([binding], {kernel.artifact: kernel}, self.slots.counters))
            self.problems.append(f"{what} was captured")
        except CaptureFailed as error:
            print(f"  refused as it should be, {what}: {str(error).splitlines()[0][:90]}")
        if self.slots.engaged is not before:
            self.problems.append(f"after {what} another table serves")

    def _see_it_run(self, table: Table, before: dict[Any, int], timeout_s: float = 20.0) -> None:
        wanted = {(binding.definition, binding.artifact) for binding in table.bindings}
        until = time.monotonic() + timeout_s
        while wanted and time.monotonic() < until:
            time.sleep(0.001)
            for cell, calls in self.slots.counters.read().items():
                if calls > before.get(cell, 0):
                    wanted.discard((cell.definition, cell.artifact))
        self.problems += [f"{definition} never ran {artifact[:12]}" for definition, artifact in wanted]

    def _case(self, kernel: TritonKernel, sizes: tuple[int, ...]) -> selftest.Case:
        dtype = str(self.block.dtype).removeprefix("torch.")
        place = str(self.block.device)
        return selftest.Case(str(kernel.path), kernel.operation, sizes, dtype, BUCKETS[-1], device=place)


def operation_of(name: str) -> str:
    return next(
        each for each in ("fused_add_rms_norm", "rms_norm", "silu_and_mul", "linear") if name.startswith(each)
    )


def _synchronising(kernel: TritonKernel) -> TritonKernel:
    """No source of the ABI can ask for this; a driver may. In a capture it is an error that makes the capture invalid."""

    def launch(*arguments: Any) -> None:
        kernel.launch(*arguments)
        torch.cuda.synchronize()

    module = cast("ModuleType", SimpleNamespace(launch=launch))
    return TritonKernel("5" * 64, kernel.operation, kernel.path, module)


def swaps(bench: Bench, count: int, *, roll_back_each: int = 10, quiet_s: float = 2.0) -> dict[str, Any]:
    """The swaps under load, with a rollback after some of them and the refusals half way."""
    tables = [bench.table(names) for names in VARIANTS.values()]
    serving = Serving(bench.graphs, bench.block)
    with serving.going():
        time.sleep(quiet_s)
        quiet = serving.spans[len(serving.spans) // 2 :]
        from_here, done = len(serving.spans), []
        reserved = 0
        for number in range(count):
            done.append(bench.swap(tables[number % len(tables)]))
            if number % roll_back_each == roll_back_each - 1:
                bench.roll_back()
            if number == count // 2:
                bench.refuse()
                reserved = torch.cuda.memory_reserved()
        busy = serving.spans[from_here:]
    wrong = int(serving.wrong)
    if wrong:
        bench.problems.append(f"{wrong} of {serving.runs} outputs were wrong")
    return {
        "swaps": len(done),
        "beside": sum(each.way == "beside" for each in done),
        "runs": serving.runs,
        "wrong": wrong,
        "worst_share_of_tolerance": round(float(serving.worst) / bench.block.tolerance(), 3),
        "recapture_s": round(statistics.median(each.capture_s for each in done), 4),
        "recapture_s_max": round(max(each.capture_s for each in done), 4),
        "flip_us": round(statistics.median(each.flip_s for each in done) * 1e6, 1),
        "flip_us_max": round(max(each.flip_s for each in done) * 1e6, 1),
        "request_ms_p99": [round(percentile(spans, 0.99) * 1e3, 3) for spans in (quiet, busy)],
        "request_ms_max": [round(max(spans) * 1e3, 3) for spans in (quiet, busy)],
        "reserved_growth_mib": (torch.cuda.memory_reserved() - reserved) >> 20,
    }


def drained(bench: Bench) -> dict[str, Any]:
    """The same where memory is said not to allow two sets: no request meanwhile."""
    graphs = GraphSet(bench.device, bench.slots, bench.block.body, BUCKETS, spare_bytes=1 << 60)
    done = [graphs.engage(bench.table(VARIANTS[name])) for name in ("first", "second")]
    for bucket in BUCKETS:
        x, expected = bench.block.requests[bucket][0]
        y = graphs.run(bucket, fill=partial(bench.block.inputs[bucket].copy_, x))
        off = float((y.float() - expected.float()).norm() / expected.float().norm())
        if not off <= bench.block.tolerance():
            bench.problems.append(f"behind a drain, an output of bucket {bucket} was off by {off:.3g}")
    graphs.close()
    if {each.way for each in done} != {"drained"}:
        bench.problems.append(f"a drain was asked for and was {[each.way for each in done]}")
    return {"paused_s": [round(each.paused_s, 3) for each in done]}


def replay_times(bench: Bench, rounds: int) -> dict[str, dict[int, float]]:
    """Microseconds of one replay by bucket, native and by variant, interleaved in one stream."""
    sets = {"native": bench.graphs.prepare(Table())}
    sets |= {name: bench.graphs.prepare(bench.table(names)) for name, names in VARIANTS.items()}
    found: dict[str, dict[int, list[float]]] = {name: {bucket: [] for bucket in BUCKETS} for name in sets}
    for bucket in BUCKETS:
        for _ in range(rounds):
            for name, captured in sets.items():
                found[name][bucket].append(_microseconds(captured.graphs[bucket][0].replay))
    torch.cuda.synchronize()
    for captured in sets.values():
        bench.graphs.discard(captured)
    return {
        name: {bucket: round(statistics.median(times), 1) for bucket, times in by_bucket.items()}
        for name, by_bucket in found.items()
    }


def _microseconds(replay: Callable[[], None], times: int = 20) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay()
    start.record()
    for _ in range(times):
        replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / times


def eager_overhead(bench: Bench) -> dict[str, float]:
    """Host microseconds of one call of silu_and_mul on one token: plain torch, an empty slot, a slot with a kernel."""
    x = torch.ones(1, 2 * bench.block.inner, device=bench.block.device, dtype=bench.block.dtype)
    slot = torch.ops.polymorph_gpu.silu_and_mul
    table = bench.table(["silu_and_mul_flat"])

    def host(call: Callable[[Any], Any], times: int = 300) -> float:
        spans = []
        for _ in range(7):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(times):
                call(x)
            spans.append((time.perf_counter() - began) / times * 1e6)
        return round(statistics.median(spans), 2)

    with bench.slots.using(Table()):
        plain, empty = host(ops.NATIVE["silu_and_mul"]), host(slot)
    with bench.slots.using(table):
        engaged = host(slot)
    return {"plain_us": plain, "empty_slot_us": empty, "engaged_slot_us": engaged}


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def measure(
    dtype: str, folder: Path, device: GraphDevice, options: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    print(f"{dtype}: loading and trying the kernels")
    slots = SlotTable(Counters("cuda", torch.cuda.is_current_stream_capturing))
    bench = Bench(Block(getattr(torch, dtype), "cuda"), folder, device, slots)
    used = bench.load()
    print(f"  worst share of a tolerance: {max(used.values()):.2f} ({max(used, key=used.__getitem__)})")
    first = bench.graphs.engage(Table())
    print(
        f"  graphs of torch's own code captured in {first.capture_s:.2f} s; {options.swaps} swaps under load"
    )
    result: dict[str, Any] = {"self_test": round(max(used.values()), 3), **swaps(bench, options.swaps)}
    result["drained"] = drained(bench)
    result["replay_us"] = replay_times(bench, 3 if options.quick else 15)
    result["eager"] = eager_overhead(bench)
    bench.graphs.close()
    for name, by_bucket in result["replay_us"].items():
        print(f"  {name:8}" + "".join(f"{time_us:9.1f}" for time_us in by_bucket.values()) + "  us a replay")
    print(f"  {json.dumps({key: value for key, value in result.items() if key != 'replay_us'})}")
    return result, [f"{dtype}: {problem}" for problem in bench.problems]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Triton kernels swapped in captured CUDA graphs.")
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="12 swaps and short timings")
    options = parser.parse_args(arguments)
    if options.quick:
        options.swaps = min(options.swaps, 12)
    if not torch.cuda.is_available():
        print("no CUDA device: this benchmark swaps kernels in CUDA graphs, run it on a machine with a GPU")
        return 2
    try:
        tools = toolchain()
    except TritonMissing as error:
        print(error)
        return 2
    from polymorph.engine.gpu.cuda import CudaDevice  # noqa: PLC0415 - only where there is one

    device, results, problems = CudaDevice(), {}, []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("bfloat16", "float16"):
            results[dtype], found = measure(dtype, Path(folder), device, options)
            problems += found
    for problem in problems:
        print(f"PROBLEM: {problem}")
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "toolchain": tools}
    print(json.dumps({"ok": not problems, "problems": problems, **about, **results}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
