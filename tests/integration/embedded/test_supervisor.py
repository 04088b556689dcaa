"""The supervisor over real processes: small ones, so that each of its promises is seen in seconds."""

import asyncio
import errno
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from polymorph.bus.errors import Fatal, Unavailable
from polymorph.embedded import supervisor as supervisor_module
from polymorph.embedded.child import Child, ChildSpec
from polymorph.embedded.cli import main
from polymorph.embedded.folder import DataFolder, StartRefused, alive, free_port
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


class Provisioning:
    """What follows readiness: fails with each error in turn, then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def __call__(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


async def test_what_follows_readiness_is_tried_again_with_its_reason_told(tmp_path: Path) -> None:
    told: list[str] = []
    provisioning = Provisioning(Unavailable("nobody answers"), Unavailable("nobody answers"))
    child = Child(
        spec(tmp_path, "one", free_port(), after_ready=provisioning),
        lambda changed: told.append(f"{changed.state} {changed.detail}"),
    )
    child.start()
    await asyncio.wait_for(child.wait_ready(), 30)
    assert child.state == "ready"
    assert "starting nobody answers; again in 0.5 s" in told
    await child.stop()


@pytest.mark.parametrize("error", [Fatal("the stream has other subjects"), ValueError("no such url")])
async def test_what_cannot_be_mended_ends_the_start_with_its_line(
    tmp_path: Path, folder: DataFolder, error: Exception
) -> None:
    supervisor = Supervisor(
        folder, [[spec(tmp_path, "one", free_port(), after_ready=Provisioning(error))]], {}
    )
    with pytest.raises(StartRefused, match=f"one: {error}"):
        await asyncio.wait_for(supervisor.run(), 30)
    pid = supervisor.children[0].pid
    assert pid is not None
    assert not alive(pid)


async def test_a_system_that_served_goes_on_where_a_later_provisioning_fails(tmp_path: Path) -> None:
    provisioning = Provisioning()
    child = Child(spec(tmp_path, "one", free_port(), after_ready=provisioning), lambda _: None)
    child.start()
    await until(lambda: child.state == "ready")
    provisioning.errors.append(Fatal("not now"))
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: "not now" in child.detail)
    await until(lambda: child.state == "ready")
    await child.stop()


async def test_a_full_disk_disables_no_supervision(
    tmp_path: Path, folder: DataFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DataFolder, "write_state", full)
    supervisor = Supervisor(folder, [[spec(tmp_path, "one", free_port())]], {})
    running = asyncio.create_task(supervisor.run())
    (child,) = supervisor.children
    await until(lambda: child.state == "ready")
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: child.state == "ready" and child.pid != first)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 30)
    assert not alive(child.pid or 0)
    said = capsys.readouterr().out
    assert said.count("supervisor.json: No space left on device") == 1


async def test_a_child_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    blocked = tmp_path / "one.log"
    blocked.mkdir()  # a log that cannot be opened
    child = Child(spec(tmp_path, "one", free_port()), lambda _: None)
    child.start()
    await until(lambda: "could not be started" in child.detail)
    blocked.rmdir()
    await until(lambda: child.state == "ready")
    await child.stop()


async def one_request() -> int:
    return 1


async def test_a_drain_says_what_it_waits_for_and_a_second_ctrl_c_ends_it(
    tmp_path: Path, folder: DataFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor_module, "_DRAIN_EVERY_S", 0.1)
    front = spec(tmp_path, "front", free_port(), DEAF, drain_s=100, in_flight=one_request)
    back = spec(tmp_path, "back", free_port(), DEAF, drain_s=100, drain_rank=1)
    supervisor = Supervisor(folder, [[front, back]], {})
    running = asyncio.create_task(supervisor.run())
    await until(lambda: [c.state for c in supervisor.children] == ["ready", "ready"])

    # One press that reaches us twice, and a request to stop that is repeated, are no second Ctrl-C.
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    await until(lambda: "drains" in (folder.read_state() or {}))
    assert [c.state for c in supervisor.children] == ["draining", "ready"]
    said = capsys.readouterr().out
    assert re.search(r"draining: 1 request in flight, at most (100|9\d) s more; Ctrl-C again stops now", said)

    await asyncio.sleep(0.6)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(running, 20)
    assert all(not alive(c.pid) for c in supervisor.children if c.pid)
    assert "stopping now" in capsys.readouterr().out


async def test_down_passes_on_what_the_drain_waits_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = textwrap.dedent(f"""
        import asyncio, os, sys
        from functools import partial
        from pathlib import Path
        from polymorph.embedded import supervisor
        from polymorph.embedded.child import ChildSpec
        from polymorph.embedded.folder import DataFolder
        from polymorph.embedded.probe import tcp_accepts
        supervisor._DRAIN_EVERY_S = 0.2
        port = {free_port()}
        folder = DataFolder(Path({str(tmp_path / "data")!r})); folder.make()
        spec = ChildSpec("one", (sys.executable, "-c", {DEAF!r}, str(port)), dict(os.environ),
                         Path({str(tmp_path / "one.log")!r}), partial(tcp_accepts, port), drain_s=1.5)
        with folder.lock():
            asyncio.run(supervisor.Supervisor(folder, [[spec]], {{}}).run())
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    data = DataFolder(tmp_path / "data")
    reaping = asyncio.create_task(asyncio.to_thread(process.wait))
    try:
        await until(lambda: state_of(data, "one") == "ready")
        assert await asyncio.to_thread(main, ["down", "--data", str(data.root)]) == 0
    finally:
        process.kill()
        await reaping
    told = capsys.readouterr().out
    assert re.search(r"draining: one, at most \d s more\n", told)
    assert told.endswith("stopped\n")


def state_of(folder: DataFolder, name: str) -> str | None:
    state = folder.read_state()
    return None if state is None else state["children"][name]["state"]


async def test_the_line_that_all_is_ready_says_what_is_served(
    tmp_path: Path, folder: DataFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serves() -> str:
        return "serves m on http://127.0.0.1:8000/v1 (mode canary)"

    supervisor = Supervisor(folder, [[spec(tmp_path, "one", free_port())]], {}, serves)
    running = asyncio.create_task(supervisor.run())
    said = ""

    def told() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return "ready: serves m on http://127.0.0.1:8000/v1 (mode canary); everything is ready after" in said

    await until(told)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 30)
