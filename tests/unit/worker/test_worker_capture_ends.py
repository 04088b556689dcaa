"""Captures that end before their time: nothing of what users sent stays in the engine or on the disk."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from tests.doubles.capturing_worker import DEFINITION, House, K, N

from polymorph.engine import capture
from polymorph.events.requests import CaptureInputs
from polymorph.workloads.collect import NotCaptured

_FULL = "No space left on device"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, _FULL), SafetensorError(f"I/O error: {_FULL}")])
async def test_a_full_disk_refuses_with_its_reason_and_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(tensors: Any, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr(capture, "save_file", full)
    house = House(tmp_path)
    with pytest.raises(NotCaptured, match=f"cannot be written to .*{_FULL}"):
        await house.ask()
    assert house.engine.slots.ops.capture_finish()[0] == []
    assert not list((tmp_path / "captures").glob("*"))


async def test_a_capture_that_is_cancelled_leaves_nothing_armed_and_nothing_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, armed = House(tmp_path), asyncio.Event()
    arm, ops = house.engine.capture, house.engine.slots.ops

    async def capture_of(*wanted: Any, **named: Any) -> None:
        await arm(*wanted, **named)
        armed.set()

    monkeypatch.setattr(house.engine, "capture", capture_of)
    request = CaptureInputs(worker_id="w", definition=DEFINITION, seconds=30)
    answers = asyncio.create_task(anext(house.capturing.answers(request)))
    await armed.wait()
    ops.linear(torch.randn(1, K), None, house.engine.layer, N)
    answers.cancel()
    await asyncio.gather(answers, return_exceptions=True)
    ops.linear(torch.randn(1, K), None, house.engine.layer, N)
    assert ops.capture_finish()[0] == []
