"""`polymorph plan`: what each worker of a pool would do to run a revision, and why; nothing is done."""

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import SecretStr, ValidationError

from polymorph.bus import topology
from polymorph.bus.credentials import Credentials
from polymorph.bus.errors import BusError, NotFound
from polymorph.bus.nats.bus import NatsBus
from polymorph.bus.port import Bus
from polymorph.config.clock import SystemClock
from polymorph.config.settings import NatsSettings
from polymorph.embedded import secrets
from polymorph.embedded.folder import DataFolder, StartRefused
from polymorph.events.requests import PlanAnswer, PlanChange
from polymorph.events.state import WorkerRecord
from polymorph.events.values import EngineSettings, Revision

PASSWORD_VARIABLE = "POLYMORPH_NATS_PASSWORD"  # noqa: S105 - the name of the variable
_CONNECT_S = 5.0
_ANSWER_S = 20.0


@dataclass(frozen=True)
class Where:
    """The bus of a running data folder, or one that is named."""

    folder: DataFolder
    url: str | None = None
    user: str | None = None

    def settings(self) -> NatsSettings:
        """Raises `StartRefused` where nothing runs on the folder."""
        if self.url is not None:
            password = os.environ.get(PASSWORD_VARIABLE)
            return NatsSettings(
                url=self.url, user=self.user, password=SecretStr(password) if password else None
            )
        state = self.folder.read_state() if self.folder.locked() else None
        if state is None:
            raise StartRefused(f"nothing runs on {self.folder.root.absolute()}; name a server with --nats")
        try:
            credentials = Credentials.load(self.folder.keys / secrets.CREDENTIALS)
        except (OSError, ValueError) as error:
            raise StartRefused(f"the credentials in {self.folder.keys} cannot be read: {error}") from error
        return credentials.nats_settings("operator", state["nats"])


def revision_in(path: Path) -> Revision:
    """A whole revision, or settings of the engine alone, as JSON or YAML.

    Raises:
        StartRefused: neither.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise StartRefused(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise StartRefused(f"{path} holds no mapping: name settings, for example max_num_seqs: 16")
    try:
        if "revision" in document:
            return Revision.model_validate(document)
        return Revision(revision="asked", engine=EngineSettings.model_validate(document))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise StartRefused(f"{path}: {place}: {first['msg']}") from error


def plan(where: Where, path: Path, pool: str | None, *, as_json: bool) -> int:
    """Prints a paragraph a worker; 0 where all would do it, 1 where one would not, 3 where there is none."""
    revision = revision_in(path)
    try:
        answers = asyncio.run(_asked(where.settings(), revision, pool))
    except (BusError, OSError) as error:
        raise StartRefused(f"the bus does not answer: {error}") from error
    if as_json:
        print(json.dumps({worker: answer.model_dump(mode="json") for worker, answer in answers.items()}))
    else:
        for worker, answer in answers.items():
            print("\n".join(told(worker, answer)))
    if not answers:
        print(f"no worker is registered{f' in pool {pool}' if pool else ''}")
        return 3
    return 0 if all(answer.ok for answer in answers.values()) else 1


async def _asked(settings: NatsSettings, revision: Revision, pool: str | None) -> dict[str, PlanAnswer]:
    bus = await NatsBus.connect(
        settings, "/polymorph/plan/0", SystemClock(), timeout_s=_ANSWER_S, wait_s=_CONNECT_S
    )
    try:
        workers = await _workers(bus, pool)
        answers = await asyncio.gather(*(_answer(bus, worker, revision) for worker in workers))
    finally:
        await bus.close()
    return dict(zip(workers, answers, strict=True))


async def _workers(bus: Bus, pool: str | None) -> list[str]:
    found = []
    for key in sorted(await bus.kv_keys(topology.WORKERS)):
        try:
            record = WorkerRecord.model_validate_json((await bus.kv_get(topology.WORKERS, key)).value or b"")
        except (NotFound, ValidationError):
            continue
        if pool in {None, record.pool}:
            found.append(record.worker_id)
    return found


async def _answer(bus: Bus, worker: str, revision: Revision) -> PlanAnswer:
    request = PlanChange(worker_id=worker, revision=revision)
    try:
        return PlanAnswer.model_validate_json(await bus.request(request, timeout_s=_ANSWER_S))
    except BusError as error:
        return PlanAnswer(ok=False, reason=f"no answer: {error}")


def told(worker: str, answer: PlanAnswer) -> list[str]:
    """Lines for people."""
    if not answer.ok:
        return [f"{worker}: would refuse: {answer.reason}"]
    lines = [f"{worker}: {answer.way}: {answer.why}"]
    lines += [f"  {change.name}: {change.now} -> {change.wanted}" for change in answer.changes]
    marks = [
        text
        for yes, text in (
            (answer.kernels, "slots are pointed at other code"),
            (answer.pause, "newcomers wait meanwhile"),
            (answer.recapture, "graphs are built anew"),
            (answer.cache_reset, "the prefix cache is lost"),
        )
        if yes
    ]
    if marks:
        lines.append(f"  {', '.join(marks)}")
    back: dict[str, Any] = answer.inverse.model_dump(exclude_none=True) if answer.inverse is not None else {}
    if back:
        lines.append(f"  taken back by {json.dumps(back)}")
    return lines
