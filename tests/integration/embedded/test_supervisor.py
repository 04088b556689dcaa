"""The supervisor over real processes: small ones, so that each of its promises is seen in seconds."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from polymorph.embedded.child import Child, ChildSpec
from polymorph.embedded.folder import DataFolder, alive, free_port
from polymorph.embedded.probe import tcp_accepts
from polymorph.embedded.supervisor import Supervisor

LISTENER = """
import socket, signal, sys, time
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("127.0.0.1", int(sys.argv[1]))); s.listen()
def bye(*_):
    print("drained", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, bye)
print("listening", flush=True)
while True: time.sleep(0.05)
"""
DEAF = LISTENER.replace("signal.signal(signal.SIGTERM, bye)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")


def spec(tmp_path: Path, name: str, port: int, code: str = LISTENER, **more: object) -> ChildSpec:
    return ChildSpec(
        name=name,
        command=(sys.executable, "-c", code, str(port)),
        environment=dict(os.environ),
        log=tmp_path / f"{name}.log",
        ready=partial(tcp_accepts, port),
        **more,  # type: ignore[arg-type]
    )


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    made = DataFolder(tmp_path / "data")
    made.make()
    return made


async def test_a_killed_child_is_started_again_and_stop_drains(tmp_path: Path) -> None:
    child = Child(spec(tmp_path, "one", free_port()), lambda _: None)
    child.start()
    await until(lambda: child.state == "ready")
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: child.state == "ready" and child.pid != first)
    assert child.restarts == 1
    await child.stop()
    assert child.state == "stopped"
    assert "drained" in (tmp_path / "one.log").read_text()
    assert child.pid is not None
    assert not alive(child.pid)


async def test_a_child_that_ignores_sigterm_is_killed_after_its_drain_time(tmp_path: Path) -> None:
    child = Child(spec(tmp_path, "deaf", free_port(), DEAF, drain_s=0.3), lambda _: None)
    child.start()
    await until(lambda: child.state == "ready")
    await child.stop()
    assert child.pid is not None
    assert not alive(child.pid)


async def test_a_child_that_keeps_dying_waits_longer_each_time(tmp_path: Path) -> None:
    child = Child(spec(tmp_path, "bad", free_port(), "import sys; sys.exit(2)"), lambda _: None)
    began = time.monotonic()
    child.start()
    await until(lambda: child.restarts >= 3)
    assert (
        time.monotonic() - began >= 0.5 + 1.0
    )  # the second and third pause; a machine under load is only slower
    assert "exit code 2" in child.detail
    await child.stop()


async def test_stages_start_in_order_and_stop_by_rank(tmp_path: Path, folder: DataFolder) -> None:
    order: list[str] = []

    def first_seen(name: str, port: int) -> ChildSpec:
        async def ready() -> bool:
            up = await tcp_accepts(port)
            if up and name not in order:
                order.append(name)
            return up

        base = spec(tmp_path, name, port, drain_rank=0 if name == "front" else 1)
        return ChildSpec(**{**base.__dict__, "ready": ready})

    supervisor = Supervisor(
        folder, [[first_seen("back", free_port())], [first_seen("front", free_port())]], {}
    )
    running = asyncio.create_task(supervisor.run())
    await until(lambda: [c.state for c in supervisor.children] == ["ready", "ready"])
    assert order == ["back", "front"]
    state = folder.read_state()
    assert state is not None
    assert state["children"]["front"]["state"] == "ready"
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 30)
    assert all(not alive(c.pid) for c in supervisor.children if c.pid)


async def test_a_killed_supervisor_leaves_no_process(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import asyncio, os, sys
        from functools import partial
        from pathlib import Path
        from polymorph.embedded.child import ChildSpec
        from polymorph.embedded.folder import DataFolder
        from polymorph.embedded.probe import tcp_accepts
        from polymorph.embedded.supervisor import Supervisor
        port = {free_port()}
        folder = DataFolder(Path({str(tmp_path / "data")!r})); folder.make()
        spec = ChildSpec("one", (sys.executable, "-c", {LISTENER!r}, str(port)), dict(os.environ),
                         Path({str(tmp_path / "one.log")!r}), partial(tcp_accepts, port))
        asyncio.run(Supervisor(folder, [[spec]], {{}}).run())
    """)
    supervisor = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    data = DataFolder(tmp_path / "data")
    try:
        await until(
            lambda: (
                (data.read_state() or {"children": {"one": {"state": ""}}})["children"]["one"]["state"]
                == "ready"
            )
        )
    finally:
        supervisor.kill()
        supervisor.wait(timeout=30)
    state = data.read_state()
    assert state is not None
    pid = state["children"]["one"]["pid"]
    await until(lambda: not alive(pid))


async def test_a_reader_that_went_away_does_not_end_the_supervisor(
    tmp_path: Path, folder: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    supervisor = Supervisor(folder, [[spec(tmp_path, "one", free_port())]], {})
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.children[0].state == "ready")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 30)
    pid = supervisor.children[0].pid
    assert pid is not None
    assert not alive(pid)
