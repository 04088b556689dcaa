"""Installs Polymorph and vLLM for the CPU into .venv (or what POLYMORPH_VENV names). Standard library only; a no-op
where nothing changed.

Each step has a stamp over what it depends on, so that an interrupted set-up goes on where it stopped.
"""

import argparse
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / os.environ.get("POLYMORPH_VENV", ".venv")
PYTHON = VENV / "bin/python"
STAMPS = VENV / ".polymorph-setup"
REQUIREMENTS = ROOT / "requirements"
MODEL = ROOT / "models/smollm2-135m-instruct"


@dataclass(frozen=True)
class Step:
    """One part of the set-up: `inputs` are the files that decide whether it must run again."""

    name: str
    takes: str
    inputs: tuple[Path, ...]
    run: Callable[[], None]
    result: Path | None = None

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.name} {sys.version} {VENV}".encode())
        for path in self.inputs:
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def done(self) -> bool:
        stamp = STAMPS / self.name
        if self.result is not None and not self.result.exists():
            return False
        return stamp.exists() and stamp.read_text() == self.fingerprint()

    def mark(self) -> None:
        STAMPS.mkdir(parents=True, exist_ok=True)
        (STAMPS / self.name).write_text(self.fingerprint())


def call(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT)


def pip(*arguments: str | Path) -> None:
    """Without bytecode, which pip compiles on one core: `compile_bytecode` uses all."""
    call(
        PYTHON,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
        "--progress-bar",
        "off",
        "-q",
        *arguments,
    )


def make_environment() -> None:
    venv.EnvBuilder(with_pip=True, clear=VENV.exists() and not PYTHON.exists()).create(VENV.resolve())


def install_torch() -> None:
    """The CPU build. Its hash is known for x86-64; elsewhere the version alone is pinned, and that is said."""
    index = os.environ.get("POLYMORPH_TORCH_INDEX")
    chosen = ["--index-url", index] if index else []
    lock = REQUIREMENTS / "torch-cpu.lock"
    if platform.machine() == "x86_64" and sys.version_info[:2] == (3, 11):
        pip(*chosen, "--force-reinstall", "--require-hashes", "-r", lock)
        return
    version = lock.read_text().split()[0]
    print(f"set-up: no hash is known for {version} on this machine; its version alone is pinned", flush=True)
    pip(*chosen, version)


def entries(locked: str) -> dict[str, str]:
    """The requirements of a lock file by name, hashes with each; what is no requirement is left out."""
    found = [entry for entry in re.split(r"\n(?=\S)", locked) if re.match(r"[A-Za-z0-9]", entry)]
    return {entry.partition("==")[0].lower(): entry for entry in found}


def shares(locked: str, number: int) -> list[str]:
    """The requirements of a lock file dealt out."""
    listed = list(entries(locked).values())
    return ["\n".join(listed[first::number]) + "\n" for first in range(number)]


def closure(instead: Path | None) -> str:
    """cpu.lock, with the requirements of `instead` in place of those of the same name."""
    locked = entries((REQUIREMENTS / "cpu.lock").read_text())
    others = entries(instead.read_text()) if instead is not None else {}
    unknown = ", ".join(sorted(others.keys() - locked.keys()))
    if unknown:
        raise ValueError(f"{instead} names {unknown}, which cpu.lock does not: it can only replace")
    return "\n".join((locked | others).values()) + "\n"


def install_closure(instead: Path | None) -> None:
    """Two at once: pip downloads and unpacks in turn, on one core. The lock is closed, so the halves are disjoint."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        files = []
        for number, share in enumerate(shares(closure(instead), 2)):
            files.append(Path(folder) / f"{number}.lock")
            files[-1].write_text(share)
        for done in [pool.submit(pip, "--require-hashes", "-r", file) for file in files]:
            done.result()


def install_project() -> None:
    pip("--no-build-isolation", "-e", ROOT)


def build_dispatcher() -> None:
    call(PYTHON, "-m", "polymorph.engine.dispatcher.build")


def compile_bytecode() -> None:
    """Before a first start, where half a dozen processes would compile the same modules at once.

    It is written also where PYTHONDONTWRITEBYTECODE keeps imports from it. A package's templates that are no Python of
    this release fail, harmlessly.
    """
    folder = next((VENV / "lib").glob("python3*/site-packages"))
    never_all = (
        r"/tests?/|/transformers/models/"  # a quarter of all text, of which one or two files are ever read
    )
    command = [PYTHON, "-m", "compileall", "-qq", "-j", "0", "-x", never_all, folder]
    subprocess.run([str(part) for part in command], check=False, cwd=ROOT)


def fetch_model() -> None:
    call(PYTHON, ROOT / "models/fetch_smollm2.py")


def stages(*, with_model: bool, instead: Path | None) -> list[list[Step]]:
    """Steps in their order; those of one stage do not need each other and run together."""
    dispatcher = ROOT / "libs/polymorph/engine/dispatcher"
    sources = tuple(sorted(p for p in dispatcher.rglob("*") if p.suffix in {".cpp", ".h", ".py"}))
    torch_lock = REQUIREMENTS / "torch-cpu.lock"
    locks = (REQUIREMENTS / "cpu.lock", *([instead] if instead is not None else []))
    built = Step("dispatcher", "1 min of C++", (*sources, torch_lock, *locks), build_dispatcher)
    last = [built, Step("bytecode", "1 min", (torch_lock, *locks), compile_bytecode)]
    if with_model:
        fetch = ROOT / "models/fetch_smollm2.py"
        last.append(
            Step("model", "1 min: SmolLM2-135M-Instruct", (fetch,), fetch_model, MODEL / "model.safetensors")
        )
    return [
        [Step("environment", "10 s", (), make_environment, PYTHON)],
        [
            Step("torch", "1 min", (torch_lock,), install_torch),
            Step(
                "packages",
                "1 to 3 min, vLLM for the CPU among them",
                locks,
                lambda: install_closure(instead),
            ),
        ],
        [Step("polymorph", "5 s", (ROOT / "pyproject.toml",), install_project)],
        last,
    ]


def run(step: Step) -> None:
    begun = time.monotonic()
    step.run()
    step.mark()
    print(f"set-up: {step.name} took {time.monotonic() - begun:.0f} s", flush=True)


def failed(stage: Sequence[Step]) -> bool:
    """Runs a stage to its end: what one step finished is not lost because another failed."""
    with ThreadPoolExecutor() as pool:
        running = [(step, pool.submit(run, step)) for step in stage]
    broken = [(step, done.exception()) for step, done in running if done.exception() is not None]
    for step, error in broken:
        told = (
            f"exit code {error.returncode} of: {' '.join(error.cmd)}"
            if isinstance(error, subprocess.CalledProcessError)
            else repr(error)
        )
        print(f"set-up stopped at {step.name}: {told}", file=sys.stderr)
    return bool(broken)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=f"Sets Polymorph up in {VENV.name}.")
    parser.add_argument(
        "--without-model", action="store_true", help="leave SmolLM2 out (tests use the small models)"
    )
    parser.add_argument(
        "--instead",
        type=Path,
        metavar="LOCK",
        help="a lock whose requirements replace those of the same name (another release of vLLM)",
    )
    options = parser.parse_args(arguments)
    started = time.monotonic()
    todo = [
        [step for step in stage if not step.done()]
        for stage in stages(with_model=not options.without_model, instead=options.instead)
    ]
    todo = [stage for stage in todo if stage]
    if not todo:
        print("set-up: nothing changed, nothing to do")
        return 0
    for number, stage in enumerate(todo, start=1):
        left = ", ".join(step.name for later in todo[number:] for step in later) or "nothing"
        now = " and ".join(f"{step.name} (about {step.takes})" for step in stage)
        print(f"set-up {number}/{len(todo)}: {now}; left after it: {left}", flush=True)
        if failed(stage):
            print("Run it again once the cause is mended: it goes on at this step.", file=sys.stderr)
            return 1
    print(f"set-up: done in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
