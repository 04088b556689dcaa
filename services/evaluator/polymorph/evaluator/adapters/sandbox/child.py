"""Inside a candidate's process: load what the evaluator sent, lock the doors, then run what it asks for.

Nothing here times or judges. The evaluator fills the inputs, holds the clock, and reads the outputs.
"""

import contextlib
import ctypes
import socket
from pathlib import Path
from typing import Any

from polymorph.evaluator.adapters.sandbox import memory, native
from polymorph.evaluator.adapters.sandbox.memory import Mapping, PmTensor
from polymorph.sandbox import landlock, limits, seccomp, wire

_PM_DTYPES = {"float32": 0, "bfloat16": 1, "uint8": memory.PM_U8}
_ITEM = {"float32": 4, "bfloat16": 2, "uint8": 1}
# The OpenMP runtime looks at the processors; everything else comes through descriptors.
_READABLE = (Path("/proc/cpuinfo"), Path("/sys/devices/system"), Path("/proc/self"))

Spec = dict[str, Any]


class Refused(ValueError):
    """The candidate did not take what it was given; the text says what."""


class Arm:
    """One side of a comparison: loaded copies of a library, or the engine's own code."""

    def __init__(self, libraries: list[ctypes.CDLL]) -> None:
        self.libraries = libraries
        self.packed: dict[str, PmTensor] = {}
        self.mappings: dict[str, Mapping] = {}


class Child:
    """The state of one candidate's process."""

    def __init__(self, sock: socket.socket, harness: ctypes.CDLL) -> None:
        self._sock = sock
        self._harness = harness
        self._arms: dict[str, Arm] = {}
        self._maps: dict[str, Mapping] = {}
        self._native: dict[str, Any] = {}
        self._pools: dict[str, Any] = {}
        self._context = 0
        self._native_op = ""

    def serve(self) -> None:
        """Answers until the evaluator is gone."""
        with contextlib.suppress(wire.Closed):
            while True:
                message, fds = wire.receive(self._sock)
                answer: Spec
                try:
                    answer = {"ok": True, **getattr(self, f"on_{message['do']}")(message, fds)}
                except (Refused, OSError, RuntimeError, KeyError) as error:
                    answer = {"ok": False, "reason": f"{type(error).__name__}: {error}"[:500]}
                wire.send(self._sock, {**answer, "nonce": message["nonce"]})

    def on_setup(self, message: Spec, fds: list[int]) -> Spec:
        limits.apply(cpu_s=message["cpu_s"], memory=limits.grown(message["memory_gib"]))
        if message["confined"]:
            landlock.restrict([(path, landlock.READ) for path in _READABLE])
        cpus = (ctypes.c_int * len(message["cpus"]))(*message["cpus"])
        threads = len(message["cpus"])
        unbound = self._harness.hx_warm(threads, cpus)
        self._native_op = message["native"]
        if self._native_op:
            native.set_threads(threads)
            native.warm(self._native_op, message["dtype"])
        for name, count in message["arms"].items():
            self._arms[name] = Arm([_load(fds.pop(0), index) for index in range(count)])
        self._context = self._harness.hx_context(threads, message["isa"], message["scratch_bytes"])
        if not self._context:
            raise Refused("no memory for scratch")
        if message["confined"]:
            seccomp.lock()
        return {"unbound": unbound}

    def on_map(self, message: Spec, fds: list[int]) -> Spec:
        mapping = memory.shared(fds[0], message["length"], writable=message["writable"])
        self._maps[message["name"]] = mapping
        return {}

    def on_unmap(self, message: Spec, _: list[int]) -> Spec:
        for name in message["names"]:
            self._maps.pop(name).unmap()
        return {}

    def on_forbid(self, message: Spec, _: list[int]) -> Spec:
        for name in message["names"]:
            self._maps.pop(name).forbid()
        return {}

    def on_pack(self, message: Spec, _: list[int]) -> Spec:
        """Packs each weight with the arm's first library; an arm of the engine's own code prepacks as vLLM does."""
        if message["arm"] == "native":
            weights = [self._torch(spec) for spec in message["weights"]]
            self._native[message["name"]] = native.Linear(weights)
            return {"bytes": 0, "path": self._native[message["name"]].path}
        arm = self._arms[message["arm"]]
        if message.get("raw"):
            arm.packed.update(
                {f"{message['name']}{i}": self._tensor(s) for i, s in enumerate(message["weights"])}
            )
            return {"bytes": _nbytes(message["weights"][0])}
        sizes = [
            self._pack(arm, f"{message['name']}{index}", spec)
            for index, spec in enumerate(message["weights"])
        ]
        return {"bytes": sizes[0]}

    def _pack(self, arm: Arm, name: str, spec: Spec) -> int:
        library, weight = arm.libraries[0], self._tensor(spec)
        library.pm_pack_bytes.restype = ctypes.c_int64
        size = int(library.pm_pack_bytes(ctypes.byref(weight)))
        most = 2 * _nbytes(spec) + (1 << 20)
        if not 0 < size <= most:
            raise Refused(f"pm_pack_bytes gave {size}: between 1 and {most} bytes is right for this weight")
        mapping = memory.private(size)
        address = mapping.address + (mapping.length - size) // 64 * 64
        rc = library.pm_pack(ctypes.c_void_p(self._context), ctypes.byref(weight), ctypes.c_void_p(address))
        if rc != 0:
            mapping.unmap()
            raise Refused(f"pm_pack returned {rc}")
        mapping.protect()
        if name in arm.mappings:
            arm.mappings[name].unmap()
        arm.mappings[name] = mapping
        sizes, strides = (ctypes.c_int64 * memory.MAX_DIMS)(size), (ctypes.c_int64 * memory.MAX_DIMS)(1)
        arm.packed[name] = PmTensor(address, sizes, strides, 1, memory.PM_U8)
        return size

    def on_call(self, message: Spec, _: list[int]) -> Spec:
        if message["arm"] == "native":
            self._call_native(message)
            return {"rc": 0}
        arm = self._arms[message["arm"]]
        inputs = self._tensors([self._packed(arm, spec) for spec in message["inputs"]])
        outputs = self._tensors([self._tensor(spec) for spec in message["outputs"]])
        run = arm.libraries[message["load"] % len(arm.libraries)].pm_run
        context = ctypes.c_void_p(self._context)
        rc = self._harness.hx_call(
            run, context, inputs, len(inputs), outputs, len(outputs), message["rubbish"]
        )  # fmt: skip
        return {"rc": rc}

    def _call_native(self, message: Spec) -> None:
        inputs = [None if "packed" in spec else self._torch(spec) for spec in message["inputs"]]
        outputs = [self._torch(spec) for spec in message["outputs"]]
        self._native_run(message.get("weights", ""))(inputs, outputs, 0)

    def _native_run(self, weights: str) -> native.Run:
        if self._native_op == "gemm":
            linear: native.Linear = self._native[weights]
            return linear.run
        return native.rms_norm if self._native_op == "rmsnorm" else native.fused_add_rms_norm

    def on_pool(self, message: Spec, _: list[int]) -> Spec:
        """Prepares `slots` calls for timing, so that a batch does nothing but call."""
        name, slots = message["arm"], message["slots"]
        if name == "native":
            calls = [self._slot(message, slot, self._torch) for slot in range(slots)]
            self._pools[name] = (calls, self._native_run(message["weights"]))
            return {}
        arm = self._arms[name]
        flat = [self._slot(message, slot, lambda spec: self._packed(arm, spec)) for slot in range(slots)]
        inputs = self._tensors([tensor for call in flat for tensor in call[0]])
        outputs = self._tensors([tensor for call in flat for tensor in call[1]])
        packed = next((at for at, spec in enumerate(message["inputs"]) if "packed" in spec), -1)
        copies = (
            [arm.packed[f"{message['weights']}{index}"] for index in range(message["copies"])]
            if packed >= 0
            else []
        )
        self._pools[name] = (
            inputs,
            len(message["inputs"]),
            outputs,
            len(message["outputs"]),
            self._tensors(copies),
            packed,
        )
        return {}

    def on_batch(self, message: Spec, _: list[int]) -> Spec:
        start, count = message["start"], message["count"]
        if message["arm"] == "native":
            calls, run = self._pools["native"]
            for slot in range(count):
                inputs, outputs = calls[slot]
                run(inputs, outputs, start + slot)
            return {"rc": 0}
        inputs, n_in, outputs, n_out, copies, packed = self._pools[message["arm"]]
        run = self._arms[message["arm"]].libraries[message["load"]].pm_run
        context = ctypes.c_void_p(self._context)
        rc = self._harness.hx_batch(
            run, context, inputs, n_in, outputs, n_out, copies, len(copies), packed, start, count
        )  # fmt: skip
        return {"rc": rc}

    def on_null(self, message: Spec, _: list[int]) -> Spec:
        native.null_calls(message["count"])
        return {}

    def on_peaks(self, message: Spec, _: list[int]) -> Spec:
        """Work for the evaluator's clock: reads memory, or multiplies and adds."""
        if message["kind"] == "read":
            mapping = self._maps[message["name"]]
            self._harness.hx_read(
                ctypes.c_void_p(mapping.address), ctypes.c_int64(mapping.length), message["threads"]
            )
            return {}
        rounds = ctypes.c_int64(message["rounds"])
        return {"done": self._harness.hx_multiply_add(rounds, message["threads"], ctypes.c_float(0.999))}

    def _slot(self, message: Spec, slot: int, make: Any) -> tuple[list[Any], list[Any]]:
        def at(spec: Spec) -> Any:
            return make(
                {**spec, "offset": spec["offset"] + slot * spec.get("step", 0)} if "map" in spec else spec
            )

        return [at(spec) for spec in message["inputs"]], [at(spec) for spec in message["outputs"]]

    def _packed(self, arm: Arm, spec: Spec) -> PmTensor:
        if "packed" not in spec:
            return self._tensor(spec)
        return arm.packed[f"{spec['packed']}0"]

    def _tensor(self, spec: Spec) -> PmTensor:
        if "map" not in spec:
            return PmTensor()
        shape = spec["shape"]
        strides = spec.get("strides") or _contiguous(shape)
        pad = [0] * (memory.MAX_DIMS - len(shape))
        sizes = (ctypes.c_int64 * memory.MAX_DIMS)(*shape, *pad)
        steps = (ctypes.c_int64 * memory.MAX_DIMS)(*strides, *pad)
        address = self._maps[spec["map"]].address + spec["offset"]
        return PmTensor(address, sizes, steps, len(shape), _PM_DTYPES[spec["dtype"]])

    def _torch(self, spec: Spec) -> Any:
        if "map" not in spec:
            return None
        buffer = self._maps[spec["map"]].buffer(spec["offset"], _nbytes(spec))
        tensor = native.tensor(buffer, spec["dtype"], spec["shape"], spec.get("strides"))
        return float(tensor[0]) if spec.get("scalar") else tensor

    def _tensors(self, tensors: list[PmTensor]) -> "ctypes.Array[PmTensor]":
        return (PmTensor * max(1, len(tensors)))(*tensors) if tensors else (PmTensor * 0)()


def _load(fd: int, index: int) -> ctypes.CDLL:
    """Every descriptor is a file of its own, so that each load is a mapping of its own."""
    memory.stir(1 + 7 * index)
    return ctypes.CDLL(f"/proc/self/fd/{fd}", mode=ctypes.RTLD_LOCAL)


def _contiguous(shape: list[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def _nbytes(spec: Spec) -> int:
    strides = spec.get("strides") or _contiguous(spec["shape"])
    last: int = sum((size - 1) * stride for size, stride in zip(spec["shape"], strides, strict=True))
    return (last + 1) * _ITEM[str(spec["dtype"])]
