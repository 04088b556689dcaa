"""The process that has the kernel: forked with everything in place, it opens nothing, starts nothing, and runs calls."""

import contextlib
import faulthandler
import itertools
import os
import resource
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymorph.kernels.load import Kernel, Tensor
from polymorph.sandbox import landlock, limits, seccomp, wire
from polymorph.sandbox.guarded import Guarded
from polymorph.sandbox.isolation import Isolation

_CPU_S = 60
_CALL_S = 60.0
_SPARE_GIB = 0.5
_MIB, _GIB = 1 << 20, 1 << 30


class KernelFailed(Exception):
    """The kernel's process ended, or the kernel did not take what it was given."""


@dataclass(frozen=True)
class Call:
    """What pm_run gets; `packed` are places of inputs that the kernel may pack first. None is an input left out."""

    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    packed: frozenset[int]


@dataclass(frozen=True)
class Place:
    """Where calls run: all memory that they touch, made before the fork."""

    library: int
    context: int
    level: int
    read: tuple[Guarded, ...]
    written: tuple[Guarded, ...]
    calls: tuple[Call, ...]


class Runner:
    """The kernel's process as the judge drives it."""

    def __init__(self, place: Place) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(_CALL_S)
        packed = sum(region.length for region in place.read)
        memory = limits.grown(_SPARE_GIB + 3 * packed / _GIB)  # told here: the new process opens nothing
        self._pid = os.fork()
        if self._pid == 0:
            _become(theirs, place, memory)
        theirs.close()

    def load(self) -> None:
        """Waits until the kernel is loaded and the doors are shut. Raises `KernelFailed`."""
        self._ask({})

    def run(self, index: int) -> None:
        """Runs one call.

        Raises:
            KernelFailed: with what the kernel did instead.
        """
        answer = self._ask({"call": index})
        if answer.get("problem"):
            raise KernelFailed(str(answer["problem"])[:300])

    def close(self) -> None:
        """Ends the process."""
        self._sock.close()
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            if message:
                wire.send(self._sock, message)
            return wire.receive(self._sock)[0]
        except TimeoutError as error:
            raise KernelFailed(f"the kernel did not return within {_CALL_S:.0f} s") from error
        except wire.Closed as error:
            raise KernelFailed(self._how_it_ended()) from error
        except wire.BadMessage as error:
            raise KernelFailed(f"the kernel's process answered {error}") from error

    def _how_it_ended(self) -> str:
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        if not os.WIFSIGNALED(status):
            return f"the kernel ended its process (exit code {os.WEXITSTATUS(status)})"
        name = signal.Signals(os.WTERMSIG(status)).name
        what = {
            "SIGSYS": "made a system call, which a kernel never does",
            "SIGSEGV": "touched memory that is not its own",
            "SIGBUS": "touched memory that is not its own",
        }.get(name, "ended its process")
        return f"the kernel {what} ({name})"


def _become(sock: socket.socket, place: Place, memory: int) -> None:
    """The new process never returns into the judge's code."""
    code = 70
    try:
        faulthandler.disable()  # whoever looks at how we ended learns more than a trace would tell
        _shed(sock.fileno(), place.library)
        kernel = _behind_doors(place, memory)
        wire.send(sock, {"ready": True})
        with contextlib.suppress(wire.Closed):
            _serve(sock, kernel, place)
        code = 0
    finally:
        os._exit(code)


def _shed(*kept: int) -> None:
    """Closes every other descriptor; the standard ones lead nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    edges = [2, *sorted(kept), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]
    for low, high in itertools.pairwise(edges):
        os.closerange(low + 1, high)


def _behind_doors(place: Place, memory: int) -> Kernel:
    limits.apply(cpu_s=_CPU_S, memory=memory, file_bytes=0)
    if place.level >= Isolation.FILTERED:
        landlock.restrict([])
    for region in place.read:
        region.shut(writable=False)
    for region in place.written:
        region.shut(writable=True)
    kernel = Kernel(Path(f"/proc/self/fd/{place.library}"))
    if place.level >= Isolation.FILTERED:
        seccomp.lock()
    return kernel


def _serve(sock: socket.socket, kernel: Kernel, place: Place) -> None:
    weights: dict[int, Tensor] = {}
    kept: list[Guarded] = []
    while True:
        message, _ = wire.receive(sock)
        call = place.calls[message["call"]]
        try:
            status = kernel.run(
                place.context, _inputs(kernel, place.context, call, weights, kept), call.outputs
            )
            problem = f"the kernel answers {status}" if status else ""
        except KernelFailed as error:
            problem = str(error)
        wire.send(sock, {"problem": problem})


def _inputs(
    kernel: Kernel, context: int, call: Call, weights: dict[int, Tensor], kept: list[Guarded]
) -> Sequence[Tensor]:
    views = []
    for place, tensor in enumerate(call.inputs):
        if tensor is None:
            views.append(Tensor.absent())
        elif place in call.packed and kernel.packs:
            address = int(tensor.data or 0)
            if address not in weights:
                kept.append(_packed(kernel, context, tensor))
                weights[address] = Tensor.packed(kept[-1].address, kept[-1].length)
            views.append(weights[address])
        else:
            views.append(tensor)
    return views


def _packed(kernel: Kernel, context: int, weight: Tensor) -> Guarded:
    size, most = kernel.pack_bytes(weight), 2 * weight.nbytes + _MIB
    if not 0 < size <= most:
        raise KernelFailed(f"pm_pack_bytes gave {size}: 1 to {most} bytes are right for this weight")
    region = Guarded(size)
    region.shut(writable=True)
    status = kernel.pack(context, weight, region.address)
    if status != 0:
        raise KernelFailed(f"pm_pack answers {status}")
    if not region.intact():
        raise KernelFailed(f"pm_pack wrote beside the {size} bytes that it asked for")
    region.shut(writable=False)
    return region
