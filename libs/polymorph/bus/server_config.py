"""The configuration of nats-server: JetStream that syncs every write, and four accounts.

CTRL holds JetStream and the services that decide. Workers (WORK) and watchers (WATCH) have accounts of their own,
joined to CTRL by exactly the subjects they need. Inside one account a client that may only ask could have the answer
sent to any subject it likes, a stream's among them; across accounts an answer only ever comes back to the asker.
"""

import json
from pathlib import Path

from polymorph.bus import topology
from polymorph.bus.credentials import ACCOUNT_OF, Account, Credentials, Role

__all__ = ["Credentials", "nats_config"]

MIB = 1024 * 1024
MEMORY_BYTES = 256 * MIB
FILE_BYTES = 64 * 1024 * MIB
MAX_PAYLOAD_BYTES = MIB

_WORKERS_READ = (topology.DESIRED, topology.QUARANTINE)

WORKER_ASKS = (
    *(f"$JS.API.DIRECT.GET.{topology.bucket_stream(bucket)}" for bucket in _WORKERS_READ),
    f"$JS.API.DIRECT.GET.{topology.object_stream(topology.ARTIFACTS)}",
    f"$JS.API.DIRECT.GET.{topology.bucket_stream(topology.WORKERS)}",
    f"$JS.API.DIRECT.GET.{topology.bucket_stream(topology.RESTARTS)}",
)
"""Reads, with many answers each."""
WORKER_KEEPS = (
    "polymorph.evt.worker.>",
    topology.key_subject(topology.WORKERS, "*"),
    topology.key_subject(topology.RESTARTS, "*"),
)
"""Writes, with one acknowledgement each."""
WORKER_HEARS = tuple(f"{topology.KEPT_VALUES}.{bucket}.>" for bucket in (*_WORKERS_READ, topology.WORKERS))
WORKER_TELLS = ("polymorph.tel.worker.>",)
WORKER_ANSWERS = ("polymorph.req.worker.>",)
WATCH_ASKS = (f"$JS.API.DIRECT.GET.{topology.EVENTS_STREAM}",)
WATCH_LOOKS = f"$JS.API.STREAM.INFO.{topology.EVENTS_STREAM}"
WATCH_HEARS = (f"{topology.KEPT_EVENTS}.>",)


def nats_config(
    store_dir: Path,
    *,
    port: int,
    monitor_port: int,
    credentials: Credentials,
    host: str = "127.0.0.1",
    file_bytes: int = FILE_BYTES,
) -> str:
    """The text of a nats-server configuration file. It holds passwords: write it readable by its owner alone.

    The monitoring endpoint listens on loopback whatever `host` is.
    """
    return f"""\
server_name: "polymorph"
host: {_text(host)}
port: {port}
http: "127.0.0.1:{monitor_port}"
max_payload: {MAX_PAYLOAD_BYTES}
jetstream {{
  store_dir: {_text(str(store_dir))}
  max_memory_store: {MEMORY_BYTES}
  max_file_store: {file_bytes}
  sync_interval: always
}}
system_account: SYS
accounts {{
{_account("CTRL", credentials, _ctrl())}
{_account("WORK", credentials, _work())}
{_account("WATCH", credentials, _watch())}
{_account("SYS", credentials, [])}
}}
"""


def _ctrl() -> list[str]:
    exports = [
        *(_service_export(subject, "WORK", "Stream") for subject in WORKER_ASKS),
        *(_service_export(subject, "WORK", "Singleton") for subject in WORKER_KEEPS),
        *(_stream_export(subject, "WORK") for subject in WORKER_HEARS),
        *(_service_export(subject, "WATCH", "Stream") for subject in WATCH_ASKS),
        _service_export(WATCH_LOOKS, "WATCH", "Singleton"),
        *(_stream_export(subject, "WATCH") for subject in WATCH_HEARS),
    ]
    imports = [
        *(_stream_import(subject, "WORK") for subject in WORKER_TELLS),
        *(_service_import(subject, "WORK") for subject in WORKER_ANSWERS),
    ]
    return ["jetstream: enabled", _list("exports", exports), _list("imports", imports)]


def _work() -> list[str]:
    exports = [
        *(_stream_export(subject, "CTRL") for subject in WORKER_TELLS),
        *(_service_export(subject, "CTRL", "Stream") for subject in WORKER_ANSWERS),
    ]
    imports = [
        *(_service_import(subject, "CTRL") for subject in (*WORKER_ASKS, *WORKER_KEEPS)),
        *(_stream_import(subject, "CTRL") for subject in WORKER_HEARS),
    ]
    return [_list("exports", exports), _list("imports", imports)]


def _watch() -> list[str]:
    imports = [
        *(_service_import(subject, "CTRL") for subject in WATCH_ASKS),
        # Under its own name it would be answered twice: by CTRL, and by the server for an account without JetStream.
        _service_import(WATCH_LOOKS, "CTRL", to=topology.EVENTS_DESCRIPTION),
        *(_stream_import(subject, "CTRL") for subject in WATCH_HEARS),
    ]
    return [_list("imports", imports)]


def _account(name: Account, credentials: Credentials, lines: list[str]) -> str:
    roles = [role for role, account in ACCOUNT_OF.items() if account == name]
    users = _list("users", [_user(role, credentials) for role in roles])
    body = "\n".join(f"    {line}" for line in [*lines, users])
    return f"  {name} {{\n{body}\n  }}"


def _user(role: Role, credentials: Credentials) -> str:
    return f"{{user: {_text(role)}, password: {_text(credentials.passwords[role].get_secret_value())}}}"


def _service_export(subject: str, account: Account, response: str) -> str:
    return f"{{service: {_text(subject)}, response_type: {response}, accounts: [{account}]}}"


def _stream_export(subject: str, account: Account) -> str:
    return f"{{stream: {_text(subject)}, accounts: [{account}]}}"


def _service_import(subject: str, account: Account, to: str | None = None) -> str:
    here = "" if to is None else f", to: {_text(to)}"
    return f"{{service: {{account: {account}, subject: {_text(subject)}}}{here}}}"


def _stream_import(subject: str, account: Account) -> str:
    return f"{{stream: {{account: {account}, subject: {_text(subject)}}}}}"


def _list(name: str, items: list[str]) -> str:
    inner = "\n".join(f"      {item}" for item in items)
    return f"{name}: [\n{inner}\n    ]"


def _text(value: str) -> str:
    return json.dumps(value)
