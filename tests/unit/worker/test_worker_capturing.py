"""Captures of real inputs over a bus, with the real dispatcher; the engine is one layer."""

import contextlib
import dataclasses
import datetime as dt
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load
from tests.doubles.capturing_worker import DEFINITION, NOW, House, K

from polymorph.bus import topology
from polymorph.bus.errors import NotFound
from polymorph.bus.port import Bus
from polymorph.embedded import capture
from polymorph.embedded.folder import DataFolder
from polymorph.embedded.where import Where
from polymorph.engine.loading.counters import Counters
from polymorph.events.state import WorkerRecord
from polymorph.kernels.schema import Workload
from polymorph.worker.capturing import PART_BYTES, weight
from polymorph.workloads import shelf
from polymorph.workloads.collect import NotCaptured


async def test_inputs_become_a_workload_that_expires(tmp_path: Path) -> None:
    house = House(tmp_path)
    digest, workload = await house.ask(calls=3)
    stored = await house.bus.get_object(digest, store=topology.CAPTURES)
    assert Workload.model_validate_json(stored) == workload
    assert workload.axes == {"M": 4}
    extension = workload.x_polymorph
    assert extension.privacy == "captured"
    assert extension.captured_at == NOW.isoformat()
    assert extension.expires_at == (NOW + dt.timedelta(seconds=topology.CAPTURES_AGE_S)).isoformat()
    assert [each.m for each in extension.captures] == [4, 4, 4]
    assert (extension.weight, extension.signature) == (1.0, "4")
    assert workload.inputs["weight"] == {"type": "random"}
    named = workload.inputs["x"]
    content = await house.bus.get_object(named["path"], store=topology.CAPTURES)
    assert load(content)[named["tensor_key"]].shape == (4, K)


async def test_who_measures_finds_it_by_pool_and_definition(tmp_path: Path) -> None:
    house = House(tmp_path)
    digest, _ = await house.ask(calls=3)
    (found,) = await shelf.standing(house.bus, pool="p", definition=DEFINITION)
    assert (found.workload, found.worker_id, found.m, found.weight) == (digest, "w", (4, 4, 4), 1.0)
    assert found.size > 3 * 4 * K * 4
    assert await shelf.standing(house.bus, pool="p", definition="gemm_n1_k1_f32") == []
    assert await shelf.standing(house.bus, pool="q") == []
    await house.bus.kv_put(topology.WORKLOADS, "p.other.1", b"{}")
    assert await shelf.standing(house.bus) == [found], "what another release wrote is left out"


def test_the_weight_is_the_share_of_time_of_the_buckets_that_were_captured() -> None:
    assert weight({"1": 10, "4": 60, "512": 30}, [3, 4, 400]) == pytest.approx(0.9)
    assert weight({}, [4]) == 1.0


async def test_experts_are_told_as_they_were_chosen_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tmp_path)
    count = house.engine.counters
    asked = iter([((100, 0),), ((130, 10),)])

    async def counters() -> Counters:
        return dataclasses.replace(await count(), experts={DEFINITION: next(asked)})

    monkeypatch.setattr(house.engine, "counters", counters)
    _, workload = await house.ask()
    assert workload.x_polymorph.expert_histogram == (0.75, 0.25)


async def test_what_derives_from_users_text_never_lies_among_the_artifacts(tmp_path: Path) -> None:
    house = House(tmp_path)
    digest, workload = await house.ask()
    for name in (digest, workload.inputs["x"]["path"]):
        with pytest.raises(NotFound):
            await house.bus.get_object(name)
    assert not list((tmp_path / "captures").glob("*"))


async def test_large_inputs_come_in_parts(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.rows = 3 * PART_BYTES // (4 * K)
    _, workload = await house.ask(calls=2, seconds=0.3)
    assert workload.axes["M"] == house.rows


async def test_capture_is_off_unless_it_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(NotCaptured, match="capture: content"):
        await House(tmp_path, "off").ask()


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"definition": "gemm_n7_k7_f32"}, "no slot has the definition"),
        ({"min_m": 100}, "no call of"),
    ],
)
async def test_a_capture_without_calls_says_why(tmp_path: Path, wanted: Any, reason: str) -> None:
    with pytest.raises(NotCaptured, match=reason):
        await House(tmp_path).ask(**wanted)


async def test_none_while_kernels_change(tmp_path: Path) -> None:
    house = House(tmp_path)
    async with house.change:
        with pytest.raises(NotCaptured, match="changing its kernels"):
            await house.ask()


async def test_bytes_that_are_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polymorph.worker import capturing

    native = capturing.CapturePart
    monkeypatch.setattr(
        capturing, "CapturePart", lambda call, content: native(call=call, content=content[:-4])
    )
    with pytest.raises(NotCaptured, match="or they are others"):
        await House(tmp_path).ask()


def record(**about: Any) -> WorkerRecord:
    known = {
        "worker_id": "w",
        "pool": "p",
        "model": "m",
        "url": "http://w",
        "state": "ready",
        "generation": 0,
    }
    known |= {
        "revision": "empty",
        "hardware": "h",
        "started_at": NOW,
        "slots": (DEFINITION, "rms_norm_h8_f32"),
    }
    return WorkerRecord.model_validate(known | about)


def command(monkeypatch: pytest.MonkeyPatch, bus: Bus, *arguments: str) -> Any:
    """The command on a bus of the test's own."""

    @contextlib.asynccontextmanager
    async def connected(settings: Any, source: str) -> AsyncIterator[Bus]:
        yield bus

    monkeypatch.setattr(capture, "connected", connected)
    options = capture._parser().parse_args([*arguments, "--nats", "nats://127.0.0.1:1"])
    where = Where(DataFolder(Path("nowhere")), options.nats)
    if options.command == "list":
        return capture._list(where, options)
    return capture._take(where, options, capture.wanted_of(options))


async def test_the_command_asks_every_worker_and_says_where_inputs_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    house = House(tmp_path)
    async with house.serving() as bus:
        assert await command(monkeypatch, bus, "take", "linear") == 3
        assert "no worker is registered" in capsys.readouterr().out
        await bus.kv_put(topology.WORKERS, "w", record().model_dump_json().encode())
        assert await command(monkeypatch, bus, "take", "linear", "--seconds", "0.1", "--calls", "2") == 0
        told = capsys.readouterr()
        (found,) = await shelf.standing(bus)
        assert f"w: {DEFINITION}: 2 calls with M of 4" in told.out
        assert f"workload {found.workload}" in told.out
        assert "weight 1.000 (share of the operation's time), shape signature 4" in told.out
        assert f"w: {DEFINITION}: listening for 0.1 s" in told.err
        assert "2 calls came" in told.err
        assert await command(monkeypatch, bus, "list", "--pool", "p", "--json") == 0
        assert json.loads(capsys.readouterr().out) == [found.model_dump(mode="json")]


async def test_the_command_says_why_nothing_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    house = House(tmp_path, "off")
    off = record(missing={"attention": "the backend is another"})
    async with house.serving() as bus:
        await bus.kv_put(topology.WORKERS, "w", off.model_dump_json().encode())
        assert await command(monkeypatch, bus, "take", DEFINITION, "--seconds", "0.1") == 1
        assert "POLYMORPH_WORKER_CAPTURE=content" in capsys.readouterr().out
        assert await command(monkeypatch, bus, "take", "attention") == 1
        refused = capsys.readouterr().out
        assert "no slot for it: slot attention is off: the backend is another" in refused
        assert f"it has {DEFINITION}" in refused
        assert await command(monkeypatch, bus, "take", "gemm_n7_k7_f32") == 1
        assert "leave slot linear out (POLYMORPH_WORKER_SLOTS), or its model" in capsys.readouterr().out
    assert await command(monkeypatch, house.bus, "take", DEFINITION, "--seconds", "0.1") == 1
    assert "ask again while it is ready" in capsys.readouterr().out
    assert await command(monkeypatch, house.bus, "list") == 0
    assert "nothing is captured now" in capsys.readouterr().out
