"""The compiler that turns a solution into a library: its digest is part of what is signed."""

import hashlib
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from subprocess import run as run_process


@dataclass(frozen=True)
class Completed:
    """How a command ended."""

    returncode: int
    stdout: str = ""
    stderr: str = ""


CommandRunner = Callable[[Sequence[str], Path], Completed]
"""Runs a command with a folder as its working directory: plainly, or inside a sandbox."""


def run_command(command: Sequence[str], folder: Path) -> Completed:
    """Runs a command on this machine as it is: for tests and trusted sources."""
    done = run_process(list(command), cwd=folder, capture_output=True, text=True, check=False)
    return Completed(done.returncode, done.stdout, done.stderr)


class NoCompiler(RuntimeError):
    """There is no usable C++ compiler."""


@dataclass(frozen=True)
class Toolchain:
    """A g++ and its linker, by path and version."""

    compiler: str
    version: str
    linker: str

    @property
    def digest(self) -> str:
        """Equal for equal compiler and linker versions, wherever they are installed."""
        known = f"{self.version}|{self.linker}"
        return f"gxx-{_number(self.version)}-{hashlib.sha256(known.encode()).hexdigest()[:12]}"


@lru_cache
def detect_toolchain(compiler: str = "g++") -> Toolchain:
    """The compiler on the path.

    Raises:
        NoCompiler: it is missing or does not answer.
    """
    path = shutil.which(compiler)
    if path is None:
        raise NoCompiler(f"{compiler} is not on PATH: install g++ (Debian and Ubuntu: apt install g++)")
    version = _first_line([path, "--version"])
    linker = _first_line([path, "-Wl,--version"])
    return Toolchain(compiler=path, version=version, linker=linker)


def _first_line(command: list[str]) -> str:
    done = run_command(command, Path())
    if done.returncode != 0 or not done.stdout:
        raise NoCompiler(f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip()[:200]}")
    return done.stdout.splitlines()[0].strip()


def _number(version: str) -> str:
    found = re.search(r"\d+(\.\d+)+", version)
    return found.group(0) if found else "unknown"
