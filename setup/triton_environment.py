"""Makes .venv-triton: Triton alone, beside the packages of .venv, for tests of GPU kernels on a machine without one.

Triton stays out of .venv: it is 286 MB to fetch and 1 GB on disk, and vLLM for the CPU warns of it at each start.
"""

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-triton"
LOCK = ROOT / "requirements/triton.lock"
MADE = FOLDER / "made-of.lock"


def main() -> int:
    if MADE.exists() and MADE.read_text() == LOCK.read_text():
        return 0
    others = next((Path(sys.prefix) / "lib").glob("python3*/site-packages"))
    print("set-up: triton, once (1 min, 1 GB)", flush=True)
    venv.EnvBuilder(with_pip=True, clear=True).create(FOLDER)
    own = next((FOLDER / "lib").glob("python3*/site-packages"))
    (own / "beside.pth").write_text(f"import site; site.addsitedir({str(others)!r})\n")
    command = [str(FOLDER / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-compile", "--require-hashes", "-q", "-r", str(LOCK)]
    subprocess.run(command, check=True, cwd=ROOT)
    MADE.write_text(LOCK.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
