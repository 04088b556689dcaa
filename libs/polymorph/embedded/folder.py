"""The data folder of embedded mode: where each thing lies, and who runs on it now."""

import fcntl
import json
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymorph.embedded.doctor import port_is_free

DEFAULT_DATA = Path(".polymorph")


class StartRefused(Exception):
    """A start that cannot work: one clear line, exit code 2."""


@dataclass(frozen=True)
class DataFolder:
    """Paths below `--data DIR`."""

    root: Path

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def state_file(self) -> Path:
        return self.run / "supervisor.json"

    @property
    def ports_file(self) -> Path:
        return self.root / "ports.json"

    @property
    def database_url(self) -> str:
        return f"sqlite+aiosqlite:///{self.root.absolute() / 'ledger.db'}"

    def service(self, name: str) -> Path:
        """The folder that one service may write."""
        return self.root / name

    def make(self) -> None:
        """Makes the folders; secrets are the owner's alone."""
        try:
            for folder in (self.root, self.logs, self.run):
                folder.mkdir(parents=True, exist_ok=True)
            self.keys.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StartRefused(
                f"cannot make {self.root}: {error.strerror}; choose a folder you may write with --data DIR"
            ) from error

    @property
    def option(self) -> str:
        """What a command needs beside its name to mean this folder."""
        return "" if self.root == DEFAULT_DATA else f" --data {shlex.quote(str(self.root))}"

    def refuse_if_held(self) -> None:
        """Raises `StartRefused` where a supervisor holds the folder; makes nothing."""
        if self.locked():
            raise self._in_use()

    def _in_use(self) -> StartRefused:
        state = self.read_state()
        return StartRefused(
            f"{self.root} is in use by a running instance (process {state['pid'] if state else 'unknown'}); "
            f"see `polymorph status{self.option}`, stop it with `polymorph down{self.option}`, "
            "or choose another folder with --data DIR"
        )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder for one supervisor.

        Raises:
            StartRefused: another one holds it.
        """
        path = self.run / "lock"
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise self._in_use() from error
            # A supervisor that was killed left its state, whose process id may be anybody's by now.
            self.state_file.unlink(missing_ok=True)
            yield

    def locked(self) -> bool:
        """Whether a supervisor holds the folder now."""
        path = self.run / "lock"
        if not path.exists():
            return False
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
            return False

    def held_by(self, pid: int) -> bool:
        """Whether process `pid` has the lock open, as the supervisor of this folder does for as long as it runs."""
        lock = self.run / "lock"
        try:
            return any(
                lock.samefile(opened) for opened in Path(f"/proc/{pid}/fd").iterdir() if opened.exists()
            )
        except OSError:
            return False

    def write_state(self, state: dict[str, Any]) -> None:
        """Replaces the state file at once, so that a reader never sees half of it."""
        temporary = self.state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(state, indent=1))
        temporary.replace(self.state_file)

    def read_state(self) -> dict[str, Any] | None:
        try:
            state: dict[str, Any] = json.loads(self.state_file.read_text())
        except (OSError, json.JSONDecodeError):
            return None
        return state

    def ports(self, names: list[str]) -> dict[str, int]:
        """A loopback port for each name: the ones of the last start where they are still free."""
        try:
            known: dict[str, int] = json.loads(self.ports_file.read_text())
        except (OSError, json.JSONDecodeError):
            known = {}
        chosen: dict[str, int] = {}
        for name in names:
            port = known.get(name, 0)
            while not port or port in chosen.values() or not port_is_free(port):
                port = free_port()
            chosen[name] = port
        self.ports_file.write_text(json.dumps(chosen, indent=1))
        return chosen


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def alive(pid: int) -> bool:
    """Whether a process with this id exists and is no zombie."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
