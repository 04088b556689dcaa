"""An embedded instance as a user starts it, for tests: real processes, a real vLLM on the small dense model."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymorph.embedded.folder import DataFolder, alive, free_port

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models/tiny-dense"
SERVED = "smollm2-135m-instruct"  # the name that the README's first request sends
START_S = 420.0


@dataclass
class Instance:
    """One `polymorph up` on a folder."""

    data: Path
    port: int
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, data: Path, *, port: int = 0, **variables: str) -> "Instance":
        port = port or free_port()
        data.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "polymorph.embedded.cli", "up", "--model", str(MODEL)]
        command += [
            "--served-model-name",
            SERVED,
            "--data",
            str(data),
            "--port",
            str(port),
            "--max-model-len",
            "512",
        ]
        environment = {**os.environ, "POLYMORPH_WORKER_ENFORCE_EAGER": "true", **variables}
        with (data / "up.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        return cls(data, port, process)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def state(self) -> dict[str, Any]:
        return DataFolder(self.data).read_state() or {"children": {}}

    def pid(self, name: str) -> int:
        return int(self.state()["children"][name]["pid"])

    def log(self) -> str:
        texts = [(self.data / "up.log").read_text(errors="replace")[-3000:]]
        texts += [
            f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}"
            for p in sorted((self.data / "logs").glob("*.log"))
        ]
        return "\n".join(texts)

    async def wait_ready(self, seconds: float = START_S) -> None:
        deadline = time.monotonic() + seconds
        while True:
            children = self.state()["children"]
            if children and all(c["state"] == "ready" for c in children.values()):
                return
            assert self.process.poll() is None, (
                f"polymorph up ended with {self.process.returncode}\n{self.log()}"
            )
            assert time.monotonic() < deadline, f"not ready: {json.dumps(children, indent=1)}\n{self.log()}"
            await asyncio.sleep(0.2)

    def stop(self, by: signal.Signals = signal.SIGINT) -> int:
        """Ends it as Ctrl-C does and returns the exit code; every process must be gone."""
        pids = [c["pid"] for c in self.state()["children"].values() if c["pid"]]
        if self.process.poll() is None:
            self.process.send_signal(by)
        code = self.process.wait(timeout=180)
        left = [pid for pid in pids if alive(pid)]
        assert not left, f"processes left behind: {left}"
        return code
