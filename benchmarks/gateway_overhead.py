"""What the gateway adds to a request: direct and through it, in turns, against a double of a worker on loopback.

Client, gateway and double share the machine, so rates are those of all three together. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import uvloop

DOUBLE = Path(__file__).parent.parent / "tests" / "doubles" / "openai_upstream.py"
_START_S = 30.0


@dataclass(frozen=True)
class Case:
    """One kind of request and how many run at once."""

    name: str
    body_bytes: int
    stream: bool
    in_flight: int
    requests: int


CASES = (
    Case("200B_1", 200, stream=False, in_flight=1, requests=300),
    Case("200B_16", 200, stream=False, in_flight=16, requests=1600),
    Case("220KB_1", 220_000, stream=False, in_flight=1, requests=150),
    Case("220KB_20", 220_000, stream=False, in_flight=20, requests=600),
    Case("stream_1", 200, stream=True, in_flight=1, requests=300),
    Case("stream_16", 200, stream=True, in_flight=16, requests=1600),
)


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@contextmanager
def running(command: list[str], environment: dict[str, str] | None = None) -> Iterator[None]:
    """A process that ends with the block."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Client:
    """A bare HTTP/1.1 client on one kept connection: as little as possible of its own."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def send(self, request: bytes) -> tuple[float, float]:
        """Sends a request; returns seconds to the first byte and to the last."""
        began = time.perf_counter()
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        first = time.perf_counter() - began
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the answer is {head!r}, not 200")
        length = _content_length(head)
        if length is None:
            await self._reader.readuntil(b"0\r\n\r\n")
        else:
            await self._reader.readexactly(length)
        return first, time.perf_counter() - began


def _content_length(head: bytes) -> int | None:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return None


def request_of(case: Case) -> bytes:
    document = {"model": "m", "stream": case.stream, "max_tokens": 16, "prompt": "x" * case.body_bytes}
    body = json.dumps(document).encode()
    path = "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def block(case: Case, port: int, share: int) -> tuple[list[float], float]:
    """One block of requests: seconds of each, and requests a second."""
    request = request_of(case)
    left = share
    seconds: list[float] = []

    async def one() -> None:
        nonlocal left
        async with Client(port) as client:
            while left > 0:
                left -= 1
                seconds.append((await client.send(request))[1])

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(case.in_flight)))
    return seconds, share / (time.perf_counter() - began)


async def measure(case: Case, direct: int, through: int, blocks: int, rng: random.Random) -> dict[str, float]:
    """Pairs of blocks in random order; the difference of medians within each pair is what the gateway adds."""
    added, rates = [], {direct: list[float](), through: list[float]()}
    medians = {direct: list[float](), through: list[float]()}
    p99: dict[int, list[float]] = {direct: [], through: []}
    for port in (direct, through):
        await block(case, port, max(20, case.requests // 10))
    for _ in range(blocks):
        order = [direct, through]
        rng.shuffle(order)
        for port in order:
            seconds, rate = await block(case, port, case.requests // blocks)
            medians[port].append(statistics.median(seconds))
            p99[port].append(sorted(seconds)[int(len(seconds) * 0.99)])
            rates[port].append(rate)
        added.append(medians[through][-1] - medians[direct][-1])
    return {
        "direct_p50_ms": round(1e3 * statistics.median(medians[direct]), 3),
        "gateway_p50_ms": round(1e3 * statistics.median(medians[through]), 3),
        "added_p50_ms": round(1e3 * statistics.median(added), 3),
        "gateway_p99_ms": round(1e3 * statistics.median(p99[through]), 3),
        "direct_req_s": round(statistics.median(rates[direct])),
        "gateway_req_s": round(statistics.median(rates[through])),
    }


async def wait_for(port: int, path: str) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            line = await reader.readline()
            writer.close()
        except OSError:
            line = b""
        if b" 200 " in line:
            return
        await asyncio.sleep(0.05)
    raise RuntimeError(f"port {port} was not ready within {_START_S:g} s")


async def run(blocks: int, seed: int) -> dict[str, dict[str, float]]:
    upstream, gateway = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder, running([sys.executable, str(DOUBLE), str(upstream)]):
        environment = {
            "POLYMORPH_GATEWAY_PORT": str(gateway),
            "POLYMORPH_GATEWAY_DATA_DIR": folder,
            "POLYMORPH_GATEWAY_WORKERS": json.dumps([f"http://127.0.0.1:{upstream}"]),
            "POLYMORPH_GATEWAY_NATS": json.dumps({"url": f"nats://127.0.0.1:{free_port()}"}),
        }
        with running([sys.executable, "-m", "polymorph.gateway"], environment):
            await wait_for(upstream, "/health")
            await wait_for(gateway, "/readyz")
            rng = random.Random(seed)
            results = {}
            for case in CASES:
                results[case.name] = await measure(case, upstream, gateway, blocks, rng)
                print(f"{case.name:10} {results[case.name]}", flush=True)
            return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=7, help="pairs of blocks a case")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    results = uvloop.run(run(arguments.blocks, arguments.seed))
    print(json.dumps({"benchmark": "gateway_overhead", "seed": arguments.seed, "results": results}))


if __name__ == "__main__":
    main()
