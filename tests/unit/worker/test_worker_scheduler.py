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


class Core:
    """Answers as the calls in the scheduler's process do; `lost` answers never come."""

    def __init__(self) -> None:
        self.seqs, self.reads, self.lost = 8, 0, False

    async def call_utility_async(self, name: str, *arguments: Any) -> dict[str, Any]:
        if name == "polymorph_set":
            self.seqs = arguments[0]["max_num_seqs"]
            if self.lost:
                raise TimeoutError
        else:
            self.reads += 1
        told = {"settings": {"max_num_seqs": self.seqs}, "envelope": {}, "missing": {}, "config": {}}
        return {"ok": True, **told, "step": 1, "salt": None}


async def test_settings_that_nobody_changed_are_not_asked_for_again() -> None:
    core = Core()
    ours = Scheduler(SimpleNamespace(engine_core=core), ValueError)
    assert (await ours.known()).settings == {"max_num_seqs": 8}
    await ours.known()
    assert core.reads == 1
    await ours.set({"max_num_seqs": 4})
    assert (await ours.known()).settings == {"max_num_seqs": 4}
    assert core.reads == 1
    core.lost = True
    with pytest.raises(Retryable):
        await ours.set({"max_num_seqs": 2})
    assert (await ours.known()).settings == {"max_num_seqs": 2}
    assert core.reads == 2
