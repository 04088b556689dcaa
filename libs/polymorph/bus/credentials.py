"""Who may connect: one user and one random password for each role."""

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, get_args

from pydantic import SecretStr

from polymorph.config.settings import NatsSettings

Role = Literal["operator", "gateway", "router", "compiler", "evaluator", "worker", "watch", "sys"]
Account = Literal["CTRL", "WORK", "WATCH", "SYS"]

ROLES: tuple[Role, ...] = get_args(Role)
ACCOUNT_OF: dict[Role, Account] = {
    "operator": "CTRL",
    "gateway": "CTRL",
    "router": "CTRL",
    "compiler": "CTRL",
    "evaluator": "CTRL",
    "worker": "WORK",
    "watch": "WATCH",
    "sys": "SYS",
}
INBOX_PREFIX: dict[Account, str] = {"CTRL": "_INBOX", "WORK": "_IW", "WATCH": "_IV", "SYS": "_INBOX"}


@dataclass(frozen=True)
class Credentials:
    """The password of every role."""

    passwords: dict[Role, SecretStr]

    @classmethod
    def generate(cls) -> Self:
        return cls({role: SecretStr(secrets.token_urlsafe(32)) for role in ROLES})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what `save` wrote.

        Raises:
            ValueError: a file of another kind, or one that misses a role.
        """
        document = json.loads(path.read_text())
        missing = [role for role in ROLES if not isinstance(document.get(role), str)]
        if missing:
            raise ValueError(
                f"{path} has no password for {', '.join(missing)}: remove it to have it made anew"
            )
        return cls({role: SecretStr(document[role]) for role in ROLES})

    @classmethod
    def load_or_generate(cls, path: Path) -> Self:
        """What stands in `path`, or new ones, saved there."""
        if path.exists():
            return cls.load(path)
        made = cls.generate()
        made.save(path)
        return made

    def save(self, path: Path) -> None:
        """Writes the passwords, readable by their owner alone."""
        document = {role: password.get_secret_value() for role, password in self.passwords.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.new")
        beside.unlink(missing_ok=True)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(document, file)
        beside.replace(path)

    def nats_settings(self, role: Role, url: str) -> NatsSettings:
        """How a service of `role` reaches the server at `url`."""
        return NatsSettings(
            url=url,
            user=role,
            password=self.passwords[role],
            inbox_prefix=INBOX_PREFIX[ACCOUNT_OF[role]],
        )
