import asyncio
from pathlib import Path

from polymorph.embedded import secrets
from polymorph.embedded.folder import DataFolder, free_port
from polymorph.embedded.options import UpOptions
from polymorph.embedded.probe import metric_sum
from polymorph.embedded.services import Services

PAGE = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0"} 7.0
vllm:nothing NaN
"""
NAMES = frozenset({"vllm:num_requests_running", "vllm:num_requests_waiting"})


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + PAGE.encode())
    writer.close()


async def test_series_are_summed_by_their_whole_name() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await metric_sum(port, NAMES) == 3
        assert await metric_sum(port, frozenset({"vllm:absent"})) is None


async def test_nobody_there_is_no_number() -> None:
    assert await metric_sum(free_port(), NAMES) is None


async def test_a_gateway_that_drains_waits_for_what_its_workers_run(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.make()
    services = Services(UpOptions(model=tmp_path, workers=2), folder, secrets.ensure(folder))
    stages = services.stages(answer)  # type: ignore[arg-type]
    gateway = next(spec for stage in stages for spec in stage if spec.name == "gateway")
    assert gateway.in_flight is not None
    assert await gateway.in_flight() is None, "no engine answers: no number is made up"
    async with await asyncio.start_server(answer, "127.0.0.1", services.ports["worker-1"]):
        assert await gateway.in_flight() == 3
