"""Kernels reach a worker that serves: verified, tested beside it, engaged between steps, read back; or refused."""

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from polymorph.bus import topology
from polymorph.bus.nats import NatsBus
from polymorph.config.clock import SystemClock
from polymorph.events.requests import ControlAnswer, ControlSlots, LeaseAnswer, LeaseHost
from polymorph.events.state import Quarantine
from polymorph.kernels.catalogue.artifacts import artifacts
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.signing import Signer

sys.path.insert(0, str(Path(__file__).parent))
from listening import events, outcome

pytestmark = [pytest.mark.engine, pytest.mark.real]

_CRASHES = (
    '#include "polymorph_kernel.h"\nextern "C" int32_t pm_run(const pm_context *, const pm_tensor *, int32_t, \
const pm_tensor *, int32_t) { __builtin_trap(); }\n'
)


async def _tokens(url: str, prompt: str, tokens: int = 16, **sampling: float) -> str:
    body = {
        "model": "tiny-dense",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
    } | (sampling or {"temperature": 0})
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(f"{url}/v1/completions", json=body)
    answer.raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] == tokens
    text: str = answer.json()["choices"][0]["text"]
    return text


async def test_a_signed_kernel_is_engaged_under_traffic(house: Any, bus: NatsBus, definition: str) -> None:
    native = await _tokens(house.url, "def main():", 32)
    async with events(bus) as heard:
        traffic = [asyncio.create_task(_tokens(house.url, f"chat number {n}", 200)) for n in range(4)]
        kernel = await house.sign(bus, house.build(), definition)
        desired = await house.desire(bus, kernel)
        event = await outcome(heard, desired.generation)
        assert event["type"] == "loaded", event
        assert event["kernels"] == [kernel.artifact]
        assert event["served_calls"] > 0
        assert event["paused_s"] < 1.0
        await asyncio.gather(*traffic)
    assert await _tokens(house.url, "def main():", 32) == native
    async with asyncio.timeout(10):
        while (await house.record(bus)).revision != desired.stable.revision:
            await asyncio.sleep(0.1)
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"model": "tiny-dense", "prompt": "x", "max_tokens": 1}
        answer = await client.post(f"{house.url}/v1/completions", json=body)
    assert answer.headers["x-polymorph-revision"] == desired.stable.revision


async def test_a_kernel_of_every_operation_is_tried_and_engaged(house: Any, bus: NatsBus) -> None:
    names = (
        "rms_norm_h256_f32",
        "fused_add_rms_norm_h256_f32",
        "silu_and_mul_d768_f32",
        "qk_norm_rotary_q4_k2_d64_r64_neox_f32",
        "attn_decode_q4_kv2_d64_b128_f32",
        "top_k_top_p_v3072_f32",
    )
    sampling = {"top_k": 40, "top_p": 0.9, "seed": 5}
    native = await _tokens(house.url, "def main():", 32)
    sampled = await _tokens(house.url, "def main():", 32, **sampling)
    kernels = []
    for name in names:
        artifact = artifacts(definition_named(name), most=1)[0]
        kernels.append(await house.sign(bus, artifact.path.read_bytes(), name))
    async with events(bus) as heard:
        traffic = [asyncio.create_task(_tokens(house.url, f"chat number {n}", 200)) for n in range(4)]
        # Nobody samples meanwhile: what the kernel of top-k and top-p is tried on are requests of the worker's own.
        desired = await house.desire(bus, *kernels)
        event = await outcome(heard, desired.generation)
        assert event["type"] == "loaded", event
        await asyncio.gather(*traffic)
    assert set(await house.engaged()) == {kernel.artifact for kernel in kernels}
    assert await _tokens(house.url, "def main():", 32) == native
    assert await _tokens(house.url, "def main():", 32, **sampling) == sampled
    served = await house.served()
    assert all(served[kernel.artifact] > 0 for kernel in kernels), served


async def test_slots_switch_for_a_measurement_and_come_back(house: Any, bus: NatsBus) -> None:
    async def control(revision: Any, ttl_s: float) -> ControlAnswer:
        request = ControlSlots(worker_id="w1", revision=revision, ttl_s=ttl_s)
        return ControlAnswer.model_validate_json(await bus.request(request, timeout_s=10))

    emptied = await control("empty", 60)
    assert emptied.ok
    await _tokens(house.url, "the code of the engine itself")
    restored = await control("stable", 60)
    assert restored.served_calls == emptied.served_calls
    await _tokens(house.url, "the kernel again")
    served = (await control("stable", 60)).served_calls
    assert served > restored.served_calls
    await control("empty", 0.5)
    async with asyncio.timeout(10):
        while (await control_calls(bus)) <= served:
            await asyncio.sleep(0.7)
            await _tokens(house.url, "back by itself", 4)


async def control_calls(bus: NatsBus) -> int:
    """Asks for what already holds; only the count in the answer matters."""
    request = ControlSlots(worker_id="w1", revision="stable", ttl_s=1)
    return ControlAnswer.model_validate_json(await bus.request(request, timeout_s=10)).served_calls


_LEAVES = """
extern "C" void exit(int);
__attribute__((constructor)) static void leave() { exit(0); }
extern "C" int pm_run() { return 0; }
"""
_REASONS = {
    "not-the-evaluator": "not trusted",
    "a-promoter": "is the promoter's: this needs the evaluator's signature",
    "wrong-promoter": "not trusted",
    "other-hardware": "another-machine",
    "quarantined": "quarantine",
    "other-definition": "judged by definition 000000000000, this installation's is",
    "other-shape": "no slot for gemm_n24_k40_f32: this engine has ",
    "constructor-exits": "imports exit",
    "other-bytes": "holds other bytes than were signed",
}


@pytest.mark.parametrize("case", _REASONS)
async def test_refuses(house: Any, bus: NatsBus, definition: str, case: str, tmp_path: Path) -> None:
    stranger = Signer.generate(tmp_path / "stranger.pem")
    leaves = tmp_path / "leaves.cpp"
    leaves.write_text(_LEAVES)
    library = house.build(f"-DREFUSES_ABOVE={100 + list(_REASONS).index(case)}")
    if case == "constructor-exits":
        library = house.build(source=leaves)
    changes: dict[str, dict[str, Any]] = {
        "other-hardware": {"hardware": "another-machine"},
        "not-the-evaluator": {"signer": stranger},
        "a-promoter": {"signer": house.promoter},
        "other-definition": {"definition_digest": "0" * 64},
    }
    wanted = "gemm_n24_k40_f32" if case == "other-shape" else definition
    kernel = await house.sign(bus, library, wanted, **changes.get(case, {}))
    if case == "quarantined":
        held = Quarantine(artifact=kernel.artifact, reason="test", since="2026-01-01T00:00:00Z")
        await bus.kv_put(topology.QUARANTINE, kernel.artifact, held.model_dump_json().encode())
    if case == "other-bytes":
        await _overwrite(house, kernel.artifact)
    before, engaged = (await house.record(bus)).revision, await house.engaged()
    async with events(bus) as heard:
        desired = await house.desire(bus, kernel, signer=stranger if case == "wrong-promoter" else None)
        event = await outcome(heard, desired.generation)
    assert event["type"] == "refused", event
    assert _REASONS[case] in event["reason"]
    assert (await house.record(bus)).revision == before
    assert await house.engaged() == engaged
    assert await _tokens(house.url, "still here")


async def _overwrite(house: Any, digest: str) -> None:
    """The store gives other bytes under that name from now on."""
    operator = await NatsBus.connect(house.nats.settings("operator"), "/polymorph/test/1", SystemClock())
    name = base64.urlsafe_b64encode(digest.encode()).decode()
    described = await operator.connection.jetstream.get_last_msg("OBJ_artifacts", f"$O.artifacts.M.{name}")
    chunks = f"$O.artifacts.C.{json.loads(described.data or b'{}')['nuid']}"
    await operator.connection.jetstream.purge_stream("OBJ_artifacts", subject=chunks)
    await operator.connection.store(chunks, b"something else")
    await operator.close()


async def test_a_kernel_that_crashes_is_refused_and_nothing_else_dies(
    house: Any, bus: NatsBus, definition: str, tmp_path: Path
) -> None:
    source = tmp_path / "crash.cpp"
    source.write_text(_CRASHES)
    kernel = await house.sign(bus, house.build(source=source), definition)
    async with events(bus) as heard:
        desired = await house.desire(bus, kernel)
        event = await outcome(heard, desired.generation)
    assert event["type"] == "refused", event
    assert "self-test" in event["reason"]
    assert await _tokens(house.url, "still here")


async def test_rolls_back_to_empty_slots(house: Any, bus: NatsBus, definition: str) -> None:
    async with events(bus) as heard:
        kernel = await house.sign(bus, house.build(), definition)
        desired = await house.desire(bus, kernel)
        event = await outcome(heard, desired.generation)
        assert event["type"] == "loaded", event
        assert await house.engaged() == [kernel.artifact]
        desired = await house.desire(bus)
        event = await outcome(heard, desired.generation)
        assert event["type"] == "loaded", event
        assert event["revision"] == "empty"
        assert event["kernels"] == []
        assert await house.engaged() == []


async def test_a_burst_ends_by_itself_and_is_reported(house: Any, bus: NatsBus) -> None:
    async def lease(**fields: Any) -> LeaseAnswer:
        request = LeaseHost(**({"worker_id": "w1", "lease_id": "l1", "burst_s": 0.3} | fields))
        return LeaseAnswer.model_validate_json(await bus.request(request, timeout_s=10))

    async with events(bus) as heard:
        traffic = asyncio.create_task(_tokens(house.url, "a long answer", 200))
        await asyncio.sleep(0.2)
        assert (await lease()).granted
        other = await lease(lease_id="l2")
        assert not other.granted
        released = await lease(release=True)
        assert 0 < released.paused_s <= 0.6
        assert (await lease()).granted
        # Nobody releases this one: the evaluator is dead. The request ends all the same.
        await traffic
        async with asyncio.timeout(30):
            while (event := await heard.get())["type"] != "host-leased":
                pass
    assert event["bursts"] == 2
    assert 0 < event["stolen_s"] < 1.2


async def test_a_paused_engine_leaves_the_cores(house: Any, bus: NatsBus) -> None:
    """vLLM's processes poll for a second after each step; a measurement beside them would share a core with that."""

    async def lease(**fields: Any) -> LeaseAnswer:
        request = LeaseHost(worker_id="w1", lease_id="l3", burst_s=0.3, **fields)
        return LeaseAnswer.model_validate_json(await bus.request(request, timeout_s=10))

    def ran_s() -> float:
        worker = psutil.Process(house.process.pid)
        paths = [p for one in (worker, *worker.children(recursive=True)) for p in _schedstats(one.pid)]
        return sum(int(path.read_text().split()[0]) for path in paths) / 1e9

    traffic = asyncio.create_task(_tokens(house.url, "a long answer", 200))
    await asyncio.sleep(0.2)
    assert (await lease()).granted
    await asyncio.sleep(0.05)
    before = ran_s()
    await asyncio.sleep(0.15)
    used = ran_s() - before
    await lease(release=True)
    await traffic
    assert used < 0.06, f"{used:.3f} s of processor time in a pause of 0.15 s"


def _schedstats(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
