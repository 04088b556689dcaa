"""The dispatcher in this process, without vLLM: torch's own linear is the native code here."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from polymorph.engine.bindings import BindingRefused
from polymorph.engine.capture import collect
from polymorph.engine.dispatcher.ops import load
from polymorph.engine.flight import in_flight
from polymorph.engine.packed import PackedWeights
from polymorph.engine.slots import Slots
from polymorph.engine.weights import WeightStore

TORCH = 2
SOURCE = Path(__file__).parent / "packed_gemm.cpp"
ABI = Path(__file__).parents[3] / "libs" / "polymorph" / "kernels" / "abi"

FLAGS = [
    "-O2",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-ffreestanding",
    "-nostdlib",
    "-fno-exceptions",
]
FLAGS += ["-fno-rtti", f"-I{ABI}"]

# Kernels that differ in nothing but their bytes.
_NUMBERED = tuple((f"copy{number}", [f"-DREFUSES_ABOVE={1000 + number}"]) for number in range(4))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("kernels")
    made = {}
    for name, defines in (("all", []), ("small", ["-DREFUSES_ABOVE=4"]), *_NUMBERED):
        path = folder / f"{name}.so"
        subprocess.run(["g++", *FLAGS, *defines, str(SOURCE), "-o", str(path)], check=True)
        made[name] = str(path)
    return made


def _close(found: Any, wanted: Any) -> None:
    """Sums of some hundred products in two orders: more apart than torch's default, and far less than one weight."""
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)


class Layer:
    """One linear layer of a width that no other test uses, so that counters are its own."""

    _k = 16

    def __init__(self, *, exact: bool = True, budget: int = 1 << 30, packed: int = 1 << 30) -> None:
        Layer._k += 16
        self.n, self.k = 32, Layer._k
        weight = torch.randn(self.n, self.k)
        self.weight = weight.bfloat16().float() if exact else weight
        self.slots = Slots(ops=load(), weights=WeightStore(budget), packed=PackedWeights(packed))
        self.definition = f"gemm_n{self.n}_k{self.k}_f32"
        self.layer_id = self.slots.add_linear(self.weight, TORCH, self.weight, held_by_model=False)

    def __call__(self, x: Any, bias: Any = None) -> Any:
        return self.slots.ops.linear(x, bias, self.layer_id, self.n)

    def binding(self, path: str, artifact: str, min_m: int = 1, max_m: int = 1 << 30) -> dict[str, Any]:
        return {
            "definition": self.definition,
            "min_m": min_m,
            "max_m": max_m,
            "path": path,
            "artifact": artifact,
        }

    def packed_for(self, binding: dict[str, Any]) -> bool:
        (kept,) = self.slots.layers[0].kept
        return kept is not None and (kept.key, f"artifact:{binding['artifact']}") in self.slots.packed

    def counts(self) -> dict[str, Any]:
        import json

        return json.loads(self.slots.ops.read_counters(False))


def test_an_empty_slot_runs_the_native_code_bit_for_bit() -> None:
    layer = Layer()
    x = torch.randn(3, layer.k)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))
    counts = layer.counts()["definitions"][layer.definition]
    assert counts["native"]["calls"] == 1
    assert counts["by_m"]["4"]["calls"] == 1


def test_an_engaged_kernel_serves_its_buckets_alone(libraries: dict[str, str]) -> None:
    layer = Layer()
    layer.slots.engage([layer.binding(libraries["all"], "k-buckets", 2, 8)])
    for m in (1, 2, 8, 9):
        x = torch.randn(m, layer.k)
        _close(layer(x), torch.nn.functional.linear(x, layer.weight))
    counts = layer.counts()
    assert counts["artifacts"]["k-buckets"]["served"]["calls"] == 2
    assert counts["definitions"][layer.definition]["native"]["calls"] == 2


def test_bias_and_more_than_two_dimensions(libraries: dict[str, str]) -> None:
    layer = Layer()
    layer.slots.engage([layer.binding(libraries["all"], "k-bias")])
    x, bias = torch.randn(2, 3, layer.k), torch.randn(layer.n)
    _close(layer(x, bias), torch.nn.functional.linear(x, layer.weight, bias))
    assert layer.counts()["artifacts"]["k-bias"]["served"]["calls"] == 1


def test_a_kernel_that_cannot_serve_leaves_the_call_to_the_native_code(libraries: dict[str, str]) -> None:
    layer = Layer()
    layer.slots.engage([layer.binding(libraries["small"], "k-small")])
    x = torch.randn(7, layer.k)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))
    assert layer.counts()["artifacts"]["k-small"] == {
        "served": {"calls": 0, "ns": 0},
        "by_m": {},
        "errors": 1,
    }


def test_a_refused_table_leaves_the_old_one(libraries: dict[str, str]) -> None:
    layer = Layer(exact=False)
    with pytest.raises(BindingRefused, match="pm_pack refused"):
        layer.slots.engage([layer.binding(libraries["all"], "k-inexact")])
    x = torch.randn(1, layer.k)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))


def test_clear_frees_what_was_packed(libraries: dict[str, str]) -> None:
    layer = Layer()
    layer.slots.engage([layer.binding(libraries["all"], "k-clear")])
    assert layer.slots.packed.bytes == layer.n * layer.k * 2
    layer.slots.engage([], keep_packed=True)
    assert layer.slots.packed.bytes > 0
    layer.slots.clear()
    assert layer.slots.packed.bytes == 0
    x = torch.randn(1, layer.k)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))


def test_one_packed_weight_serves_all_kernels_of_a_layout(libraries: dict[str, str]) -> None:
    layer = Layer()
    bindings = [
        layer.binding(libraries["all"], "k-low", 1, 4) | {"layout": "panels"},
        layer.binding(libraries["small"], "k-high", 5, 16) | {"layout": "panels"},
    ]
    assert layer.slots.prepare(bindings, 10.0) == 0
    layer.slots.engage(bindings)
    assert layer.slots.packed.bytes == layer.n * layer.k * 2


def test_what_is_staged_changes_nothing_until_it_flips(libraries: dict[str, str]) -> None:
    layer = Layer()
    x = torch.randn(1, layer.k)
    layer.slots.stage([layer.binding(libraries["all"], "k-staged")])
    layer(x)
    assert layer.counts()["definitions"][layer.definition]["native"]["calls"] == 1
    epoch = layer.slots.flip()
    layer(x)
    counts = layer.counts()
    assert counts["epoch"] == epoch
    assert counts["artifacts"]["k-staged"]["by_m"] == {"1": counts["artifacts"]["k-staged"]["served"]}
    with pytest.raises(BindingRefused, match="nothing was staged"):
        layer.slots.flip()


def test_every_call_packs_a_weight_however_short_its_time(libraries: dict[str, str]) -> None:
    layer = Layer()
    for _ in range(2):
        layer.slots.add_linear(layer.weight.clone(), TORCH, layer.weight, held_by_model=False)
    bindings = [layer.binding(libraries["all"], "k-slices")]
    assert [layer.slots.stage(bindings, seconds=0) for _ in range(3)] == [2, 1, 0]


def test_what_is_abandoned_never_runs_and_frees_its_weights(libraries: dict[str, str]) -> None:
    layer = Layer()
    layer.slots.stage([layer.binding(libraries["all"], "k-abandoned")])
    layer.slots.abandon()
    assert layer.slots.packed.bytes == 0
    with pytest.raises(BindingRefused, match="nothing was staged"):
        layer.slots.flip()
    layer(torch.randn(1, layer.k))
    assert layer.counts()["definitions"][layer.definition]["native"]["calls"] == 1


def _mapped(path: str) -> bool:
    return path in Path("/proc/self/maps").read_text()


def test_a_library_stays_for_some_epochs_and_is_then_unloaded(libraries: dict[str, str]) -> None:
    layer = Layer()
    layer.slots.ops.keep_epochs(2)
    paths = [libraries[f"copy{number}"] for number in range(4)]
    x = torch.randn(1, layer.k)
    try:
        for index, path in enumerate(paths):
            layer.slots.engage([layer.binding(path, f"k-epoch{index}")])
            layer(x)
        assert [_mapped(path) for path in paths] == [False, True, True, True]
        layer.slots.engage([layer.binding(paths[0], "k-epoch0")])
        _close(layer(x), torch.nn.functional.linear(x, layer.weight))
        assert layer.counts()["artifacts"]["k-epoch0"]["served"]["calls"] == 2
        layer.slots.clear()
        layer.slots.clear()
        layer.slots.clear()
        assert not any(_mapped(path) for path in paths)
    finally:
        layer.slots.ops.keep_epochs(4)


def test_a_refused_library_is_not_kept(libraries: dict[str, str]) -> None:
    layer = Layer(packed=8)
    with pytest.raises(BindingRefused, match="budget of"):
        layer.slots.engage([layer.binding(libraries["copy3"], "k-unkept")])
    assert libraries["copy3"] not in layer.slots.ops.loaded_libraries()


def test_the_flight_record_names_the_kernel_that_is_called(libraries: dict[str, str], tmp_path: Path) -> None:
    import struct

    record = tmp_path / "rank-0.flight"
    layer = Layer()
    layer.slots.ops.open_flight(str(record))
    artifact = "f" * 64
    epoch = layer.slots.engage([layer.binding(libraries["all"], artifact)])
    began, seen, digest, calls = struct.unpack("<qq64sq40x", record.read_bytes())
    assert (began, seen, digest.decode(), calls) == (0, epoch - 1, artifact, 1), "the weight was packed"
    layer(torch.randn(1, layer.k))
    began, seen, digest, calls = struct.unpack("<qq64sq40x", record.read_bytes())
    assert (began, seen, digest.decode(), calls) == (0, epoch, artifact, 2)


@pytest.mark.parametrize("fault", ["HANGS", "CRASHES"])
def test_a_kernel_that_never_ends_its_packing_is_seen_in_it(tmp_path: Path, fault: str) -> None:
    artifact, library = "f" * 64, tmp_path / "faulty.so"
    subprocess.run(["g++", *FLAGS, f"-DPACK_{fault}", str(SOURCE), "-o", str(library)], check=True)
    packs = (
        "import sys, torch; from polymorph.engine.dispatcher.ops import load; ops = load(); "
        f"ops.open_flight(sys.argv[1]); ops.pack(sys.argv[2], '{artifact}', torch.zeros(16, 16))"
    )
    command = [sys.executable, "-c", packs, str(tmp_path / "rank-0.flight"), str(library)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as packing:
        try:
            until = time.monotonic() + 120
            while not in_flight(tmp_path) and time.monotonic() < until:
                time.sleep(0.05)
            assert [flight.artifact for flight in in_flight(tmp_path)] == [artifact]
            if fault == "CRASHES":
                assert packing.wait(60) < 0
                assert [flight.artifact for flight in in_flight(tmp_path)] == [artifact]
        finally:
            packing.kill()


def test_budgets_refuse_with_what_would_be_right(libraries: dict[str, str]) -> None:
    forgotten = Layer(budget=0)
    with pytest.raises(BindingRefused, match="was not kept"):
        forgotten.slots.engage([forgotten.binding(libraries["all"], "k-forgotten")])
    narrow = Layer(packed=8)
    with pytest.raises(BindingRefused, match="budget of"):
        narrow.slots.engage([narrow.binding(libraries["all"], "k-narrow")])


def test_a_reloaded_weight_empties_the_slots_and_packs_anew(libraries: dict[str, str]) -> None:
    layer = Layer()
    layer.slots.engage([layer.binding(libraries["all"], "k-old")])
    fresh = torch.randn(layer.n, layer.k).bfloat16().float()
    layer.slots.reload_linear(layer.layer_id, fresh, TORCH, fresh, held_by_model=False)
    x = torch.randn(1, layer.k)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, fresh))
    layer.slots.engage([layer.binding(libraries["all"], "k-new")])
    _close(layer(x), torch.nn.functional.linear(x, fresh))
    assert layer.counts()["artifacts"]["k-new"]["served"]["calls"] == 1


def test_capture_keeps_some_real_inputs(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    layer = Layer()
    layer.slots.ops.capture_start(layer.definition, 2, 2, 1 << 20, 2, 4)
    inputs = [torch.randn(m, layer.k) for m in (2, 8, 3, 4, 1, 2)]
    for x in inputs:
        layer(x)
    calls = collect(layer.slots, tmp_path / "captured", weight=True)["calls"]
    assert [call["m"] for call in calls] == [2, 4]
    assert torch.equal(load_file(calls[1]["path"])["x"], inputs[3])
    assert torch.equal(load_file(calls[0]["weight"])["weight"], layer.weight)
    assert (tmp_path / "captured").stat().st_mode & 0o077 == 0


def test_of_several_layers_the_weight_of_the_first_call_alone_is_written_and_only_when_asked_for(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file

    layer = Layer()
    other = layer.slots.add_linear(torch.randn(layer.n, layer.k), TORCH, layer.weight, held_by_model=False)

    def captured(*, weight: bool) -> list[dict[str, Any]]:
        layer.slots.ops.capture_start(layer.definition, 4, 1, 1 << 20, 1, 8)
        for layer_id in (layer.layer_id, other, layer.layer_id, other):
            layer.slots.ops.linear(torch.randn(1, layer.k), None, layer_id, layer.n)
        calls: list[dict[str, Any]] = collect(layer.slots, tmp_path / str(weight), weight=weight)["calls"]
        return calls

    assert [call["weight"] for call in captured(weight=False)] == [None] * 4
    assert not list((tmp_path / "False").glob("weight-*"))
    calls = captured(weight=True)
    (written,) = (tmp_path / "True").glob("weight-*")
    assert [call["weight"] for call in calls] == [str(written), None] * 2
    assert torch.equal(load_file(written)["weight"], layer.weight)


def test_a_ring_keeps_the_last_inputs_within_its_bytes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    layer = Layer()
    room = 3 * layer.k * 4  # three rows
    layer.slots.ops.capture_start(layer.definition, 2, 1, room, 1, 8, True)
    inputs = [torch.randn(m, layer.k) for m in (1, 1, 2, 1, 4, 1)]  # four rows at once never fit
    for x in inputs:
        layer(x)
    calls = collect(layer.slots, tmp_path / "captured")["calls"]
    assert [call["m"] for call in calls] == [1, 1]
    assert torch.equal(load_file(calls[0]["path"])["x"], inputs[3])
    assert torch.equal(load_file(calls[1]["path"])["x"], inputs[5])


def test_the_call_stays_one_operator_in_a_compiled_graph() -> None:
    layer = Layer()
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        del example
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: layer(x) * 2, backend=backend, fullgraph=True)
    x = torch.randn(2, layer.k)
    _close(compiled(x), torch.nn.functional.linear(x, layer.weight) * 2)
    assert any("polymorph.linear" in str(node.target) for node in graphs[0].graph.nodes)


@pytest.mark.parametrize("step", ["prepare", "engage"])
def test_a_refusal_frees_what_was_packed_for_it(libraries: dict[str, str], step: str) -> None:
    layer = Layer()
    one = layer.n * layer.k * 2
    layer.slots.packed.budget_bytes = 3 * one
    layer.slots.add_linear(layer.weight.clone(), TORCH, layer.weight, held_by_model=False)
    layer.slots.engage([layer.binding(libraries["all"], f"k-before-{step}")])
    assert layer.slots.packed.bytes == 2 * one
    with pytest.raises(BindingRefused, match="budget of"):
        getattr(layer.slots, step)(
            [layer.binding(libraries["small"], "k-second")], *([10.0] if step == "prepare" else [])
        )
    assert layer.slots.packed.bytes == 2 * one
    layer(torch.randn(1, layer.k))
    assert layer.counts()["artifacts"][f"k-before-{step}"]["served"]["calls"] == 1


def test_the_command_of_the_set_up_builds_it() -> None:
    """Else the first worker does, inside its start, or fails where its file system is read-only."""
    command = [sys.executable, "-m", "polymorph.engine.dispatcher.build"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert Path(done.stdout.strip()).exists()


def test_going_back_to_one_of_the_last_kernels_packs_nothing(libraries: dict[str, str]) -> None:
    layer = Layer()
    one = layer.n * layer.k * 2
    made = [layer.binding(libraries["all"], f"k-way-back-{number}") for number in range(4)]
    for binding in made:
        layer.slots.engage([binding])
    assert layer.slots.packed.bytes == 3 * one  # what is in force, and two to go back to
    assert [layer.packed_for(binding) for binding in made] == [False, True, True, True]
    layer.slots.engage([made[1]])
    assert [layer.packed_for(binding) for binding in made] == [False, True, True, True]
    x = torch.randn(1, layer.k)
    _close(layer(x), torch.nn.functional.linear(x, layer.weight))
    assert layer.counts()["artifacts"]["k-way-back-1"]["served"]["calls"] == 1


def test_what_is_kept_for_a_way_back_gives_way_to_what_is_to_run(libraries: dict[str, str]) -> None:
    layer = Layer()
    one = layer.n * layer.k * 2
    layer.slots.packed.budget_bytes = 2 * one
    made = [layer.binding(libraries["all"], f"k-narrow-{number}") for number in range(3)]
    for binding in made:
        layer.slots.engage([binding])
    assert layer.slots.packed.bytes == 2 * one
    assert [layer.packed_for(binding) for binding in made] == [False, True, True]
    at_once = zip(made, ((1, 1), (2, 2), (3, 4)), strict=True)
    with pytest.raises(BindingRefused, match="budget of"):
        layer.slots.engage([each | {"min_m": low, "max_m": high} for each, (low, high) in at_once])
    layer(torch.randn(1, layer.k))
    assert layer.counts()["artifacts"]["k-narrow-2"]["served"]["calls"] == 1
