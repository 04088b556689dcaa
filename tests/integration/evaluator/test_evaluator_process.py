"""`python -m polymorph.evaluator` on a real nats-server: it serves, ends, and a kill -9 loses no job."""

import asyncio
import json
import os
import signal
import sys

import pytest

from polymorph.bus.port import StreamRecord
from polymorph.events.types import CandidateEvaluated
from polymorph.events.values import Gate, Verdict

pytestmark = [pytest.mark.alone, pytest.mark.real]


@pytest.fixture
def launch(nats_server, tmp_path):
    """Starts the service's process with an environment as embedded mode gives it."""

    async def start() -> asyncio.subprocess.Process:
        settings = nats_server.settings("evaluator")
        nats = {
            "url": settings.url,
            "user": settings.user,
            "password": settings.password.get_secret_value() if settings.password else None,
            "inbox_prefix": settings.inbox_prefix,
        }
        environment = {
            **os.environ,
            "POLYMORPH_EVALUATOR_DATA_DIR": str(tmp_path / "data"),
            "POLYMORPH_EVALUATOR_SIGNING_KEY": str(tmp_path / "keys" / "evaluator.key"),
            "POLYMORPH_EVALUATOR_NATS": json.dumps(nats),
            "POLYMORPH_EVALUATOR_HOST_LEASE": "auto",
        }
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "polymorph.evaluator", env=environment
        )

    return start


async def _answer(bus, evaluation_id: str) -> CandidateEvaluated:
    async with asyncio.timeout(120):
        async for record in bus.events(after="0-0"):
            if (
                isinstance(record, StreamRecord)
                and record.envelope.data.get("evaluation_id") == evaluation_id
            ):
                return CandidateEvaluated.model_validate(record.envelope.data)
    raise AssertionError("the stream of events ended")


async def test_a_job_survives_the_death_of_the_evaluator(launch, bus_factory, asking_on) -> None:
    bus = await bus_factory("compiler")
    asking = asking_on(bus)
    command = await asking.order(asking.solution(), Gate.G2_CORRECT)
    await bus.publish(command)
    first = await launch()
    await asyncio.sleep(1.0)
    first.send_signal(signal.SIGKILL)
    await first.wait()
    second = await launch()
    event = await _answer(bus, command.evaluation_id)
    assert event.verdict is Verdict.PASSED, event.reason
    second.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        assert await second.wait() == 0


async def test_settings_that_cannot_be_end_with_one_line(tmp_path) -> None:
    environment = {**os.environ, "POLYMORPH_EVALUATOR_MIN_ISOLATION": "perfect"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "polymorph.evaluator", env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"one of process, filtered, namespaced" in err
