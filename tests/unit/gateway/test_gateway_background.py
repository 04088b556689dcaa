"""Background tasks of the gateway go on, whatever happens in them."""

import asyncio
import logging

import pytest

from polymorph.gateway import app


async def test_a_background_task_that_fails_is_told_and_starts_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "_AGAIN_S", 0.0)
    again = asyncio.Event()
    failures = [AttributeError("an oddity")]

    async def probe() -> None:
        if failures:
            raise failures.pop()
        again.set()
        await asyncio.Event().wait()

    with caplog.at_level(logging.ERROR):
        task = asyncio.create_task(app._for_ever(probe))
        await asyncio.wait_for(again.wait(), 10)
    task.cancel()
    assert "probe ended and starts again" in caplog.text
    assert "an oddity" in caplog.text
