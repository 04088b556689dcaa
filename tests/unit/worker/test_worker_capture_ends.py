"""Captures that end before their time: nothing of what users sent stays in the engine or on the disk."""

import asyncio
import errno
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import SafetensorError
from tests.doubles.capturing_worker import DEFINITION, House, K, N

from polymorph.engine import capture
from polymorph.engine.bindings import SlotBinding
from polymorph.engine.loading.loader import Loader
from polymorph.events.requests import CaptureInputs
from polymorph.kernels.isa import Isa
from polymorph.kernels.signing import Trust
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
    house = House(tmp_path)
    request = CaptureInputs(worker_id="w", definition=DEFINITION, seconds=30)
    await _cut_off(house, monkeypatch, anext(house.capturing.answers(request)))


async def test_a_self_test_that_is_cancelled_likewise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, nothing = House(tmp_path), cast("Any", None)
    monkeypatch.setattr("polymorph.engine.loading.loader._CAPTURE_S", 30)
    loader = Loader(cast("Any", house.engine), nothing, Trust(), "here", Isa.GENERIC, tmp_path, nothing)
    await _cut_off(
        house, monkeypatch, loader._captured(SlotBinding(DEFINITION, 1, 8, "/x.so", "a" * 64), tmp_path)
    )


async def _cut_off(house: House, monkeypatch: pytest.MonkeyPatch, capturing: Awaitable[Any]) -> None:
    """Cancels it once it has armed the slot, and requires that the slot keeps none of the calls that come then."""
    arm, ops, armed = house.engine.capture, house.engine.slots.ops, asyncio.Event()

    async def capture_of(*wanted: Any, **named: Any) -> None:
        await arm(*wanted, **named)
        armed.set()

    monkeypatch.setattr(house.engine, "capture", capture_of)
    cut = asyncio.ensure_future(capturing)
    await armed.wait()
    ops.linear(torch.randn(1, K), None, house.engine.layer, N)
    cut.cancel()
    await asyncio.gather(cut, return_exceptions=True)
    for _ in range(10):
        ops.linear(torch.randn(1, K), None, house.engine.layer, N)
    assert ops.capture_finish()[0] == []
