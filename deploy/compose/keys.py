"""Makes keys, passwords and configuration, each service's in a folder of its own. What exists is kept.

A folder is a volume that only its service mounts: nobody reads another's password or signing key.
"""

import argparse
import json
import os
import secrets
import sys
from pathlib import Path

from polymorph.bus.credentials import Credentials, Role
from polymorph.bus.server_config import nats_config
from polymorph.kernels import signing

SERVICE_ROLES: tuple[Role, ...] = ("gateway", "router", "compiler", "evaluator", "worker")
NATS_PORT, MONITOR_PORT = 4222, 8222


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="the folder that holds one folder for each service")
    parser.add_argument("--nats-url", default="nats://nats:4222")
    parser.add_argument("--nats-store", default="/data/jetstream", help="as the server's container sees it")
    parser.add_argument("--owner", type=int, default=10001, help="user id that services run as")
    options = parser.parse_args()
    make(options.root, nats_url=options.nats_url, nats_store=Path(options.nats_store), owner=options.owner)
    print(f"keys and passwords stand in {options.root}")
    return 0


def make(root: Path, *, nats_url: str, nats_store: Path, owner: int) -> None:
    """Idempotent. Only root may give files to `owner`; anybody else keeps them."""
    operator = root / "operator"
    credentials = Credentials.load_or_generate(operator / "credentials.json")
    for role in ("operator", *SERVICE_ROLES):
        write(root / role / "polymorph.yaml", _configuration(credentials, role, nats_url))
    _signing_keys(root)
    server = nats_config(
        nats_store,
        port=NATS_PORT,
        monitor_port=MONITOR_PORT,
        credentials=credentials,
        host="0.0.0.0",  # noqa: S104 - inside its container, on a network without a way out
    )
    write(root / "nats" / "nats.conf", server)
    _database_password(root)
    for path in sorted(root.rglob("*")):
        _give(path, owner)
    # PostgreSQL's entry point reads its password as root, before it becomes the user postgres.
    _give(root / "postgres" / "password", 0)


def write(path: Path, text: str) -> None:
    """Readable by its owner alone; replaced in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    beside.replace(path)


def _configuration(credentials: Credentials, role: Role, url: str) -> str:
    """polymorph.yaml of one service. JSON is YAML."""
    settings = credentials.nats_settings(role, url)
    password = settings.password.get_secret_value() if settings.password else None
    nats = {
        "url": settings.url,
        "user": settings.user,
        "password": password,
        "inbox_prefix": settings.inbox_prefix,
    }
    return json.dumps({"common": {"nats": nats}}, indent=2) + "\n"


def _signing_keys(root: Path) -> None:
    """One private key for each signer; the public ones go to whoever verifies."""
    evaluator = signing.Signer.load_or_generate(root / "evaluator" / "evaluator.key")
    promoter = signing.Signer.load_or_generate(root / "compiler" / "promoter.key")
    trust = signing.Trust()
    trust.add(evaluator.public, signing.Role.EVALUATOR)
    trust.add(promoter.public, signing.Role.PROMOTER)
    trust.save(root / "worker" / "trust.json")


def _database_password(root: Path) -> None:
    kept = root / "postgres" / "password"
    password = kept.read_text() if kept.exists() else secrets.token_urlsafe(32)
    write(kept, password)
    write(root / "compiler" / "database_password", password)


def _give(path: Path, owner: int) -> None:
    if os.geteuid() == 0:
        os.chown(path, owner, owner)


if __name__ == "__main__":
    sys.exit(main())
