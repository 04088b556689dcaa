"""Settings of a worker that change while it serves: what its streams notice, and how long each change takes.

One worker with the small model, compiled, under eight streams that follow each other without a pause. `max_num_seqs`
changes live, `block_size` by an engine warmed beside the first. QUICK=1 is shorter. The last line is JSON.
"""

import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.demo.stack import Process

from polymorph.bus import topology
from polymorph.bus.nats import NatsBus
from polymorph.bus.port import StreamRecord
from polymorph.bus.provision import provision
from polymorph.bus.server import NatsServer
from polymorph.config.clock import SystemClock
from polymorph.embedded.folder import free_port
from polymorph.events.state import DesiredState, Mode, PromoterSignature
from polymorph.events.values import EngineSettings, Revision
from polymorph.kernels.signing import Role, Signer, Trust

MODEL = Path(__file__).parents[1] / "models" / "tiny-dense"
POOL, WORKER = "bench", "w1"
STREAMS, TOKENS = 8, 256
LIVE = ({"max_num_seqs": 4}, {"max_num_seqs": 8})
ENGINE = ({"block_size": 64}, {"block_size": 32})
QUICK = os.environ.get("QUICK", "") not in {"", "0"}
STEPS = [*LIVE, *LIVE, ENGINE[0]] if QUICK else [*LIVE, *LIVE, ENGINE[0], *LIVE, ENGINE[1]] * 2
_START_S, _CHANGE_S, _CALM_S = 400.0, 300.0, 5.0 if QUICK else 10.0
_BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - _BEGAN:6.1f} s  {text}", flush=True)


@dataclass
class Seen:
    """What the streams noticed; `gaps` are seconds between two pieces of one stream, by the phase they ended in."""

    phase: str = "calm"
    streams: int = 0
    failed: int = 0
    truncated: int = 0
    pieces: int = 0
    gaps: dict[str, float] = field(default_factory=dict)
    revisions: set[str] = field(default_factory=set)

    def gap(self, began: str, seconds: float) -> None:
        for phase in {began, self.phase}:
            self.gaps[phase] = max(self.gaps.get(phase, 0.0), seconds)


class Load:
    """Streams that follow each other on each lane."""

    def __init__(self, url: str, seen: Seen) -> None:
        self._url = url
        self._seen = seen
        self._ending = False
        self._lanes = [asyncio.create_task(self._lane(lane)) for lane in range(STREAMS)]

    async def end(self) -> None:
        """Lets the streams in flight end."""
        self._ending = True
        await asyncio.gather(*self._lanes)

    async def _lane(self, lane: int) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        number = 0
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not self._ending:
                number += 1
                await self._stream(session, f"lane {lane}, request {number}:")

    async def _stream(self, session: aiohttp.ClientSession, prompt: str) -> None:
        body = {
            "model": "tiny-dense",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._seen.streams += 1
        try:
            async with session.post(f"{self._url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    self._seen.failed += 1
                    return
                self._seen.revisions.add(answer.headers["x-polymorph-revision"])
                await self._read(answer)
        except (aiohttp.ClientError, OSError):
            self._seen.failed += 1

    async def _read(self, answer: aiohttp.ClientResponse) -> None:
        last, phase = time.monotonic(), ""
        tokens, ended = 0, False
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            now = time.monotonic()
            if (
                phase
            ):  # before the first piece it waits for its turn in the batch, which is no pause of a stream
                self._seen.gap(phase, now - last)
            last, phase = now, self._seen.phase
            self._seen.pieces += 1
            ended = ended or line.startswith(b"data: [DONE]")
            if b'"completion_tokens"' in line:
                tokens = int(json.loads(line[6:])["usage"]["completion_tokens"])
        if not ended or tokens != TOKENS:
            self._seen.truncated += 1


class Bench:
    """A bus, a worker and the promoter of its pool."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.nats = NatsServer(folder / "nats", port=free_port(), monitor_port=free_port())
        self.promoter = Signer.generate(folder / "promoter.pem")
        trust = Trust()
        trust.add(self.promoter.public, Role.PROMOTER)
        trust.save(folder / "trust.json")
        self.generation = 0
        self.settings: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[NatsBus]:
        await self.nats.start()
        await provision(self.nats.settings("operator"), monitor_url=self.nats.monitor_url)
        bus = await NatsBus.connect(self.nats.settings("compiler"), "/polymorph/bench/0", SystemClock())
        worker = Process(
            "worker",
            [sys.executable, "-m", "polymorph.worker"],
            self._environment(),
            self.folder / "worker.log",
        )
        await worker.start()
        try:
            await self._served(worker)
            yield bus
        finally:
            await worker.stop()
            await bus.close()
            await self.nats.kill()

    def _environment(self) -> dict[str, str]:
        nats = self.nats.settings("worker")
        variables = {
            "WORKER_ID": WORKER,
            "PORT": str(self.port),
            "MODEL": str(MODEL),
            "SERVED_MODEL_NAME": "tiny-dense",
            "POOL": POOL,
            "MAX_MODEL_LEN": "512",
            "MAX_NUM_SEQS": str(STREAMS),
            "TRUST_FILE": str(self.folder / "trust.json"),
            "DATA_DIR": str(self.folder / "data"),
            "NATS__URL": nats.url,
            "NATS__USER": nats.user or "",
            "NATS__PASSWORD": nats.password.get_secret_value() if nats.password else "",
            "NATS__INBOX_PREFIX": nats.inbox_prefix,
        }
        return {**os.environ, **{f"POLYMORPH_WORKER_{name}": value for name, value in variables.items()}}

    async def _served(self, worker: Process) -> None:
        async with asyncio.timeout(_START_S), aiohttp.ClientSession() as session:
            while True:
                if worker.ended() is not None:
                    raise SystemExit(f"the worker ended: {worker.log.read_text(errors='replace')[-2000:]}")
                try:
                    async with session.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.3)

    async def change(self, bus: NatsBus, settings: dict[str, Any]) -> dict[str, Any]:
        """Promotes a revision with these settings beside those of before; what the worker says it did."""
        self.generation += 1
        self.settings |= settings
        state = DesiredState(
            pool=POOL,
            generation=self.generation,
            mode=Mode.CANARY,
            stable=Revision(revision=f"s{self.generation}", engine=EngineSettings(**self.settings)),
        )
        signature = PromoterSignature(
            key_id=self.promoter.key_id, signature=self.promoter.sign(state.signed_content())
        )
        signed = state.model_copy(update={"signature": signature})
        await bus.kv_put(topology.DESIRED, POOL, signed.model_dump_json().encode())
        async with asyncio.timeout(_CHANGE_S):
            async for record in bus.events(subjects="polymorph.evt.worker.>", after="0-0"):
                if isinstance(record, StreamRecord) and record.envelope.data["generation"] == self.generation:
                    return dict(record.envelope.data)
        raise SystemExit("the event stream ended")


async def measured(folder: Path) -> dict[str, Any]:
    bench, seen = Bench(folder), Seen()
    say("a worker starts, which takes about a minute")
    async with bench.running() as bus:
        say("the worker serves")
        load = Load(bench.url, seen)
        await asyncio.sleep(_CALM_S)
        changes = [await _timed(bench, bus, seen, settings) for settings in STEPS]
        seen.phase = "calm"
        await load.end()
    return _report(seen, changes)


async def _timed(bench: Bench, bus: NatsBus, seen: Seen, settings: dict[str, Any]) -> dict[str, Any]:
    seen.phase = "engine" if "block_size" in settings else "live"
    say(f"{settings} is asked for")
    began = time.monotonic()
    answer = await bench.change(bus, settings)
    seconds = time.monotonic() - began
    if "reason" in answer:
        raise SystemExit(f"{settings} was refused: {answer['reason']}")
    in_force = {name: answer["settings"][name] for name in settings}
    if in_force != settings:
        raise SystemExit(f"{settings} was asked for, {in_force} is in force")
    say(f"{settings}: {answer['way']}, {seconds:.2f} s, stood {answer['stood_s'] * 1e3:.2f} ms")
    await asyncio.sleep(1.0)
    return {"way": answer["way"], "seconds": seconds, "stood_s": answer["stood_s"]}


def _report(seen: Seen, changes: list[dict[str, Any]]) -> dict[str, Any]:
    ways = sorted({change["way"] for change in changes})
    by_way = {way: [change for change in changes if change["way"] == way] for way in ways}
    return {
        "changes": len(changes),
        "failed": seen.failed,
        "truncated": seen.truncated,
        "streams": seen.streams,
        "revisions_seen": len(seen.revisions),
        "way": {way: len(found) for way, found in by_way.items()},
        "seconds_per_change": {
            way: round(sum(each["seconds"] for each in found) / len(found), 3)
            for way, found in by_way.items()
        },
        "stood_s": {way: round(max(each["stood_s"] for each in found), 6) for way, found in by_way.items()},
        "pause_s": round(max(seen.gaps.get(way, 0.0) for way in ways), 3),
        "largest_gap_s": {phase: round(seconds, 3) for phase, seconds in sorted(seen.gaps.items())},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"benchmark": "settings"} | asyncio.run(measured(Path(folder)))))


if __name__ == "__main__":
    main()
