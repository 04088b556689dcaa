"""Builds the C++ host once and opens contexts on it."""

import ctypes
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from polymorph.config.folders import cache_folder
from polymorph.kernels.build import ABI_HEADER
from polymorph.kernels.isa import Isa, detect_isa
from polymorph.kernels.toolchain import CommandRunner, Toolchain, detect_toolchain, run_command

SOURCE = Path(__file__).parent / "host.cpp"
# Bytes for each thread: the same in an engine, here and in the evaluator, so that no kernel can tell them apart by it.
SCRATCH_BYTES = 1 << 20
_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-fopenmp")


class HostUnavailable(RuntimeError):
    """The host library cannot be built or opened."""


class KernelHost:
    """A pool of threads (OpenMP) that kernels run on, outside of an engine. Needs neither torch nor numpy."""

    def __init__(self, library: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise HostUnavailable(f"{library} does not load: {error}") from error
        self._open = self._library.pm_host_open
        self._open.restype = ctypes.c_void_p
        self._open.argtypes = [ctypes.c_int32, ctypes.c_int32, ctypes.c_int64]
        self._close = self._library.pm_host_close
        self._close.restype = None
        self._close.argtypes = [ctypes.c_void_p]

    @classmethod
    def build(
        cls,
        folder: Path | None = None,
        toolchain: Toolchain | None = None,
        runner: CommandRunner = run_command,
    ) -> Self:
        """The host in `folder` (the cache by default), compiled where it is not there yet.

        Raises:
            HostUnavailable: it does not compile.
        """
        return cls(host_library(folder or cache_folder(), toolchain or detect_toolchain(), runner))

    @contextmanager
    def context(
        self, threads: int, isa: Isa | None = None, scratch_bytes: int = SCRATCH_BYTES
    ) -> Iterator[int]:
        """The address of a pm_context with so many threads, freed at the end."""
        if threads < 1 or scratch_bytes < SCRATCH_BYTES:
            raise ValueError(
                f"{threads} threads with {scratch_bytes} bytes of scratch: at least 1 and {SCRATCH_BYTES}"
            )
        tier = detect_isa() if isa is None else isa
        address = self._open(tier, threads, scratch_bytes)
        if not address:
            raise HostUnavailable(f"no memory for {threads} times {scratch_bytes} bytes of scratch")
        try:
            yield address
        finally:
            self._close(address)


def host_library(folder: Path, toolchain: Toolchain, runner: CommandRunner) -> Path:
    """The path of the compiled host, named by its sources and compiler.

    Raises:
        HostUnavailable: it does not compile.
    """
    known = "|".join((SOURCE.read_text(), ABI_HEADER.read_text(), toolchain.digest, *_FLAGS))
    name = f"host-{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
    library = folder.resolve() / name
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    staged = f"{name}.{os.getpid()}"
    command = [toolchain.compiler, *_FLAGS, f"-I{ABI_HEADER.parent}", str(SOURCE), "-o", staged]
    done = runner(command, folder)
    if done.returncode != 0:
        raise HostUnavailable(f"the kernel host does not compile: {done.stderr.strip()[:500]}")
    (folder / staged).replace(library)
    return library
