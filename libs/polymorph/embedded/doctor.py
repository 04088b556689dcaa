"""Checks beforehand what a start would trip over. Standard library only: it runs before anything is installed."""

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

MIN_PYTHON = (3, 11)
MAX_PYTHON = (3, 14)
MIN_MEMORY_GIB = 6.0
MIN_DISK_GIB = 10.0
_REPOSITORY = Path(__file__).resolve().parents[3]
_DEFAULT_NAME = "smollm2-135m-instruct"
# In a checkout the model lies where `make setup` puts it, whatever folder the command is given in.
DEFAULT_MODEL = (_REPOSITORY if (_REPOSITORY / "models").is_dir() else Path()) / "models" / _DEFAULT_NAME
Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One check: what was found and, where that is not right, what would be."""

    check: str
    level: Level
    found: str
    wanted: str = ""

    def line(self) -> str:
        mark = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}[self.level]
        return f"{mark}  {self.check:<10} {self.found}" + (f"  ->  {self.wanted}" if self.wanted else "")


def check_system() -> Finding:
    system = f"{platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("system", "fail", system, "Linux on x86_64 or aarch64 (on others, use containers)")
    if platform.machine() not in {"x86_64", "aarch64"}:
        return Finding("system", "fail", system, "x86_64 or aarch64: vLLM has no CPU build for others")
    return Finding("system", "ok", f"{system}, kernel {platform.release()}")


def check_python() -> Finding:
    version = sys.version_info[:3]
    text = ".".join(map(str, version))
    if not MIN_PYTHON <= version[:2] < MAX_PYTHON:
        return Finding("python", "fail", text, "Python 3.11 to 3.13")
    return Finding("python", "ok", text)


def check_compiler(environment: dict[str, str] | None = None) -> Finding:
    """Kernels are C++: a compiler that cannot build a shared library stops everything later."""
    path = (os.environ if environment is None else environment).get("PATH", "")
    compiler = shutil.which("g++", path=path)
    if compiler is None:
        return Finding(
            "compiler", "fail", "no g++ on PATH", "install g++ 11 or newer (Debian: apt-get install g++)"
        )
    with tempfile.TemporaryDirectory(prefix="polymorph-doctor-") as folder:
        source = Path(folder, "t.cpp")
        source.write_text('#include <stdint.h>\nextern "C" int32_t f() { return 7; }\n')
        done = subprocess.run(
            [
                compiler,
                "-std=c++17",
                "-O2",
                "-shared",
                "-fPIC",
                "-fopenmp",
                str(source),
                "-o",
                str(Path(folder, "t.so")),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    if done.returncode != 0:
        return Finding(
            "compiler",
            "fail",
            f"{compiler} cannot build: {done.stderr.strip()[:120]}",
            "a working g++ with OpenMP",
        )
    version = subprocess.run(
        [compiler, "-dumpfullversion"], capture_output=True, text=True, timeout=30, check=False
    )
    return Finding("compiler", "ok", f"g++ {version.stdout.strip()}")


def cpu_flags() -> set[str]:
    """The flags of /proc/cpuinfo (x86: `flags`, Arm: `Features`), empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return set(value.split())
    return set()


def check_isa(flags: set[str] | None = None) -> Finding:
    have = cpu_flags() if flags is None else flags
    if "avx512_bf16" in have:
        return Finding("isa", "ok", "AVX-512 with BF16: the engine runs bfloat16")
    if "avx512f" in have:
        return Finding("isa", "ok", "AVX-512 without BF16: the engine runs float32")
    if "avx2" in have and "fma" in have:
        return Finding("isa", "ok", "AVX2 and FMA: the engine runs float32")
    if platform.machine() == "aarch64":
        return Finding("isa", "ok", "Arm: kernels use the generic tier")
    return Finding("isa", "fail", "no AVX2", "an x86-64 CPU with AVX2 and FMA: vLLM has no build below that")


def memory_gib() -> float:
    """Memory that a new process can have, in GiB, after cgroup limits."""
    available = 0.0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) / 2**20
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        available = min(available, (int(text) - used) / 2**30)
    return available


def check_memory(needed_gib: float = MIN_MEMORY_GIB, available_gib: float | None = None) -> Finding:
    available = memory_gib() if available_gib is None else available_gib
    if available < needed_gib:
        wanted = f"{needed_gib:.1f} GiB: a worker and the evaluator's engine each hold the model"
        return Finding("memory", "fail", f"{available:.1f} GiB available", wanted)
    return Finding("memory", "ok", f"{available:.1f} GiB available")


def check_disk(folder: Path, needed_gib: float = MIN_DISK_GIB) -> Finding:
    """Whether the data folder can be made, or written where it is there, and has room."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    wanted = "a folder that you may write, with --data DIR"
    if not place.is_dir():
        return Finding("disk", "fail", f"{place} is a file, not a folder", wanted)
    if not _takes_files(place):
        return Finding("disk", "fail", f"{place} is not writable", wanted)
    free = shutil.disk_usage(place).free / 2**30
    if free < needed_gib:
        return Finding(
            "disk", "fail", f"{free:.1f} GiB free at {place}", f"{needed_gib:.0f} GiB: the engine alone is 4"
        )
    return Finding("disk", "ok", f"{free:.1f} GiB free")


def _takes_files(folder: Path) -> bool:
    """By trying: what permissions say is not so for root, nor on file systems such as /proc."""
    try:
        with tempfile.TemporaryDirectory(prefix=".polymorph-doctor-", dir=folder):
            return True
    except OSError:
        return False


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def check_port(port: int) -> Finding:
    if not 0 < port < 65536:
        return Finding("port", "fail", f"{port} is no port", "a number from 1 to 65535")
    if not port_is_free(port):
        return Finding(
            "port", "fail", f"port {port} is taken", "another one with --port, or stop what listens there"
        )
    return Finding("port", "ok", f"{port} is free")


def check_model(folder: Path) -> Finding:
    """A model folder that vLLM can serve has at least a config.json with an architecture."""
    config = folder / "config.json"
    if not config.is_file():
        wanted = "a folder in Hugging Face's format, with --model DIR"
        if folder == DEFAULT_MODEL:
            return Finding(
                "model", "fail", f"the default model is not at {folder}", f"run `make setup`, or {wanted}"
            )
        return Finding("model", "fail", f"{folder} holds no config.json", wanted)
    try:
        architectures = json.loads(config.read_text()).get("architectures")
    except (json.JSONDecodeError, AttributeError, UnicodeDecodeError):
        return Finding("model", "fail", f"{config} is not JSON", "the config.json that came with the model")
    if not architectures:
        return Finding("model", "fail", f"{config} names no architecture", 'a key "architectures"')
    if not any(folder.glob("*.safetensors")):
        return Finding(
            "model", "fail", f"{folder} holds no *.safetensors", "the model's weights as safetensors"
        )
    return Finding("model", "ok", f"{folder.name} ({architectures[0]})")


CHECKS = ("system", "python", "compiler", "isa", "memory", "disk", "port", "model")


def examine(
    *, port: int, data: Path, model: Path = DEFAULT_MODEL, skip: Collection[str] = ()
) -> list[Finding]:
    """Every check but those to `skip`, in the order in which a start would trip over them."""
    checks: dict[str, Callable[[], Finding]] = {
        "system": check_system,
        "python": check_python,
        "compiler": check_compiler,
        "isa": check_isa,
        "memory": check_memory,
        "disk": lambda: check_disk(data),
        "port": lambda: check_port(port),
        "model": lambda: check_model(model),
    }
    return [checks[name]() for name in CHECKS if name not in skip]


def report(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Prints the findings; the exit code is 2 where one fails."""
    listed = list(findings)
    if as_json:
        print(json.dumps([asdict(finding) for finding in listed]))
    else:
        for finding in listed:
            print(finding.line())
    return 2 if any(finding.level == "fail" for finding in listed) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="polymorph doctor", description="Checks what a start would trip over."
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--data", type=Path, default=Path(".polymorph"))
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument(
        "--skip", action="append", default=[], choices=CHECKS, help="leave a check out, by its name"
    )
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args(arguments)
    findings = examine(port=options.port, data=options.data, model=options.model, skip=options.skip)
    return report(findings, as_json=options.as_json)


if __name__ == "__main__":
    sys.exit(main())
