"""Captures that end before their time: nothing of what users sent stays in the engine or on the disk."""

import errno
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from tests.doubles.capturing_worker import House

from polymorph.engine import capture
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
