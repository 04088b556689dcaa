"""Calls to the scheduler's process: what fails there comes back as a plain `Exception`, as vLLM's client raises it."""

from types import SimpleNamespace
from typing import Any

import pytest

from polymorph.bus.errors import Retryable
from polymorph.engine.loading.admission import Refused
from polymorph.worker.adapters.scheduler import Scheduler


def scheduler(failure: str) -> Scheduler:
    async def call(name: str, *_: Any) -> Any:
        raise Exception(f"Call to {name} method failed: {failure}")  # noqa: TRY002 - as vLLM's client does

    return Scheduler(SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=call)), ValueError)


async def test_an_engine_without_our_calls_refuses() -> None:
    missing = "'EngineCoreProc' object has no attribute 'polymorph_settings'"
    with pytest.raises(Refused, match="is the plugin of Polymorph loaded"):
        await scheduler(missing).read()


async def test_a_call_that_failed_is_made_again_later() -> None:
    with pytest.raises(Retryable, match=r"failed to answer polymorph_set: .*timed out"):
        await scheduler("RPC call to check_health timed out.").set({"max_num_seqs": 8})
