"""A fleet as it serves: gateway, router, compiler and two workers over a real nats-server, each a process."""

import asyncio
import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from polymorph.bus import topology
from polymorph.bus.credentials import Role as Account
from polymorph.bus.errors import NotFound
from polymorph.bus.nats import NatsBus
from polymorph.bus.provision import provision
from polymorph.bus.server import NatsServer
from polymorph.compiler.adapters.promoter import Promoter
from polymorph.compiler.adapters.promotion_change import Change
from polymorph.compiler.adapters.promotion_keys import PromotionKeys
from polymorph.compiler.domain.promotion.policy import Policy
from polymorph.config.clock import SystemClock
from polymorph.embedded.folder import free_port
from polymorph.events.state import DesiredState, Mode, WorkerRecord
from polymorph.events.subjects import pool_id
from polymorph.kernels.signing import Role, Signer, Trust
from polymorph.ledger.database import SqlDatabase
from polymorph.ledger.ledger import Ledger
from polymorph.ledger.migrations import upgrade

MODEL = "tiny-dense"
POOL = pool_id(MODEL)
WORKERS = ("w1", "w2")
SEQUENCES = 4
START_S = 300.0

StartWorker = Callable[..., "subprocess.Popen[bytes]"]


@dataclass
class Fleet:
    """What runs, and the keys that it trusts."""

    folder: Path
    nats: NatsServer
    evaluator: Signer
    promoter: Signer
    url: str
    bus: NatsBus
    database: SqlDatabase
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def promoting(self, policy: Policy) -> Promoter:
        """One beside the compiler's own, on the same record."""
        clock = SystemClock()
        ledger = Ledger(self.database, clock, source="/polymorph/compiler/test")
        change = Change(PromotionKeys(self.bus, self.promoter, clock), ledger)
        return Promoter(change, lambda: uuid.uuid4().hex, policy=policy)

    async def record(self, worker: str) -> WorkerRecord | None:
        try:
            entry = await self.bus.kv_get(topology.WORKERS, worker)
        except NotFound:
            return None
        return WorkerRecord.model_validate_json(entry.value or b"{}")

    async def desired(self) -> DesiredState:
        entry = await self.bus.kv_get(topology.DESIRED, POOL)
        return DesiredState.model_validate_json(entry.value or b"")

    async def until(self, worker: str, **wanted: object) -> WorkerRecord:
        """The first record with these values."""
        async with asyncio.timeout(START_S):
            while True:
                record = await self.record(worker)
                if record is not None and wanted.items() <= vars(record).items():
                    return record
                await asyncio.sleep(0.05)

    async def engaged(self, worker: str) -> list[str]:
        """Artifacts that the slots run, by the engine itself and not by what the worker believes."""
        async with httpx.AsyncClient(timeout=30) as client:
            url = f"http://127.0.0.1:{self.ports[worker]}/collective_rpc"
            answer = await client.post(url, json={"method": "slots_describe"})
        answer.raise_for_status()
        return [binding["artifact"] for binding in answer.json()["results"][0]["engaged"]]

    def kill_engine(self, worker: str) -> None:
        """SIGKILL to the process that schedules, as the kernel's OOM killer would."""
        below = psutil.Process(self.processes[worker].pid).children(recursive=True)
        cores = [each for each in below if any("EngineCore" in part for part in each.cmdline())]
        assert cores, [each.cmdline() for each in below]
        for core in cores:
            core.kill()

    def logs(self) -> str:
        texts = [
            f"--- {p.parent.name}/{p.name}\n{p.read_text(errors='replace')[-2500:]}" for p in self._logs()
        ]
        return "\n".join(texts)

    def _logs(self) -> list[Path]:
        return sorted([*self.folder.glob("*.log"), *self.folder.glob("w?/*.log")])

    def _run(self, service: str, account: Account, **variables: str) -> None:
        settings = self.nats.settings(account)
        assert settings.password is not None
        named = {
            "DATA_DIR": str(self.folder / service),
            "NATS__URL": settings.url,
            "NATS__USER": settings.user or "",
            "NATS__PASSWORD": settings.password.get_secret_value(),
            "NATS__INBOX_PREFIX": settings.inbox_prefix,
        } | variables
        prefix = f"POLYMORPH_{service.upper()}_"
        environment = {**os.environ, **{f"{prefix}{name}": value for name, value in named.items()}}
        with (self.folder / f"{service}.log").open("ab") as log:
            command = [sys.executable, "-m", f"polymorph.{service}"]
            self.processes[service] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=self.folder
            )

    async def begin(self, start_worker: StartWorker, database_url: str) -> None:
        for worker in WORKERS:
            folder = self.folder / worker
            folder.mkdir()
            self.ports[worker] = free_port()
            self.processes[worker] = start_worker(
                folder,
                self.nats,
                self.ports[worker],
                WORKER_ID=worker,
                POOL=POOL,
                MAX_NUM_SEQS=str(SEQUENCES),
                SLOTS="linear",
                TRUST_FILE=str(self.folder / "trust.json"),
            )
        self._run("router", "router")
        self._run("gateway", "gateway", PORT=self.url.rpartition(":")[2])
        self._run(
            "compiler",
            "compiler",
            DATABASE_URL=database_url,
            SIGNING_KEY=str(self.folder / "p.pem"),
            DEFAULT_MODE="canary",
            MIN_REQUESTS="1000000",
        )
        for worker in WORKERS:
            await self.until(worker, state="ready")
        await self.promoting(Policy("direct")).ensure_pool(POOL, Mode.CANARY)

    async def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                await asyncio.to_thread(process.wait, 60)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait, 10)
        await self.database.close()
        await self.bus.close()
        await self.nats.kill()


@contextlib.asynccontextmanager
async def fleet(folder: Path, start_worker: StartWorker) -> AsyncIterator[Fleet]:
    nats = NatsServer(folder / "nats", port=free_port(), monitor_port=free_port())
    evaluator, promoter = Signer.generate(folder / "e.pem"), Signer.generate(folder / "p.pem")
    trust = Trust()
    trust.add(evaluator.public, Role.EVALUATOR)
    trust.add(promoter.public, Role.PROMOTER)
    trust.save(folder / "trust.json")
    database_url = f"sqlite+aiosqlite:///{folder}/ledger.db"
    await nats.start()
    await provision(nats.settings("operator"), monitor_url=nats.monitor_url)
    await upgrade(database_url)
    bus = await NatsBus.connect(nats.settings("compiler"), "/polymorph/compiler/test", SystemClock())
    url = f"http://127.0.0.1:{free_port()}"
    made = Fleet(folder, nats, evaluator, promoter, url, bus, SqlDatabase(database_url))
    try:
        await made.begin(start_worker, database_url)
        yield made
    finally:
        await made.end()


class Journey:
    """One greedy stream through the gateway, as its client sees it."""

    def __init__(self, name: str, prompt: str, tokens: int) -> None:
        self.name = name
        self.body: dict[str, Any] = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        self.status = 0
        self.text = ""
        self.tokens: list[int] = []
        self.usage: dict[str, Any] = {}
        self.lines: list[str] = []

    @property
    def whole(self) -> bool:
        return self.status == 200 and self.lines[-1] == "data: [DONE]" and not self.errors

    @property
    def errors(self) -> list[str]:
        return [line for line in self.lines if '"error"' in line]

    async def go(self, client: httpx.AsyncClient) -> None:
        headers = {"x-request-id": self.name}
        async with client.stream("POST", "/v1/completions", json=self.body, headers=headers) as answer:
            self.status = answer.status_code
            async for line in answer.aiter_lines():
                if line:
                    self.lines.append(line)
                if line.startswith("data: {"):
                    self._take(line)

    def _take(self, line: str) -> None:
        part = httpx.Response(200, content=line[6:]).json()
        self.usage = part.get("usage") or self.usage
        for choice in part.get("choices", ()):
            self.text += choice["text"]
            self.tokens += choice["token_ids"] or ()
