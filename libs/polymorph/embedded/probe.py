"""What a process says of itself: a TCP port that accepts, an HTTP path that says 200, a sum of its metrics."""

import asyncio
import re


async def tcp_accepts(port: int, host: str = "127.0.0.1", timeout_s: float = 1.0) -> bool:
    """Whether something accepts connections there."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout_s)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def metric_sum(port: int, names: frozenset[str], timeout_s: float = 1.0) -> int | None:
    """The sum of these series of a Prometheus page at /metrics, or None where it cannot be had."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /metrics HTTP/1.0\r\nhost: 127.0.0.1\r\n\r\n")
                await writer.drain()
                page = (await reader.read()).decode(errors="replace")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    found = re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (\S+)", page, re.MULTILINE)
    values = [float(value) for name, value in found if name in names]
    return int(sum(values)) if values else None


async def http_status(port: int, path: str, host: str = "127.0.0.1", timeout_s: float = 3.0) -> int:
    """The status of a GET, or 0 where nobody answers in time."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
                await writer.drain()
                line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0
    parts = line.split()
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0
