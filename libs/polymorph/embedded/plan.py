"""`polymorph plan`: what each worker of a pool would do to run a revision, and why; nothing is done."""

import asyncio
import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from polymorph.bus.errors import BusError
from polymorph.bus.port import Bus
from polymorph.config.settings import NatsSettings
from polymorph.embedded.folder import StartRefused
from polymorph.embedded.where import ANSWER_S, Where, connected, registered
from polymorph.events.requests import PlanAnswer, PlanChange
from polymorph.events.values import EngineSettings, Revision


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
    async with connected(settings, "/polymorph/plan/0") as bus:
        workers = [record.worker_id for record in await registered(bus, pool)]
        answers = await asyncio.gather(*(_answer(bus, worker, revision) for worker in workers))
    return dict(zip(workers, answers, strict=True))


async def _answer(bus: Bus, worker: str, revision: Revision) -> PlanAnswer:
    request = PlanChange(worker_id=worker, revision=revision)
    try:
        return PlanAnswer.model_validate_json(await bus.request(request, timeout_s=ANSWER_S))
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
