"""The compiler as a process on a real nats-server and SQLite, with doubles of the router and the evaluator around it."""

import asyncio
import contextlib
import datetime as dt
import json
import os
import random
import signal
import sys

import pytest
import pytest_asyncio

from polymorph.bus.errors import BusError
from polymorph.bus.port import Consumption, StreamRecord
from polymorph.events.state import DesiredState
from polymorph.events.types import CandidateEvaluated, EvaluateCandidate, TrafficShapeObserved
from polymorph.events.values import (
    Gate,
    Numerics,
    Operation,
    Quantiles,
    Ratio,
    TrafficShape,
    Verdict,
)
from polymorph.kernels.schema import Solution, Workload
from polymorph.kernels.signing import Role, Signer, Trust

POOL = "chat-1"
GATE_UP, DOWN = "gemm_n3072_k576_f32", "gemm_n576_k1536_f32"


def _flat(value):
    return Quantiles(mean=value, p10=value, p50=value, p90=value, p99=value)


class CompilerProcess:
    """`python -m polymorph.compiler`, killed and started on the same data."""

    def __init__(self, folder, server, **settings):
        self._folder = folder
        nats = server.settings("compiler")
        values = {
            "database_url": f"sqlite+aiosqlite:///{folder}/record/polymorph.db",
            "signing_key": str(folder / "promoter.key"),
            "default_mode": "canary",
            "drift_windows": "2",
            "min_requests": "10",
            "candidates_per_search": "10",
            "searches_per_drift": "1",
            "cooldown_s": "600",
            "tick_s": "0.2",
            "evaluation_timeout_s": "5",
            "health_port": str(settings.pop("health_port", 0)),
            "data_dir": str(folder),
            "nats": json.dumps(
                {
                    "url": nats.url,
                    "user": nats.user,
                    "password": nats.password.get_secret_value(),
                    "inbox_prefix": nats.inbox_prefix,
                }
            ),
            **settings,
        }
        self._environment = {
            **os.environ,
            **{f"POLYMORPH_COMPILER_{key.upper()}": value for key, value in values.items()},
        }
        self._process = None

    async def start(self):
        log = (self._folder / "compiler.log").open("ab")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "polymorph.compiler", env=self._environment, stdout=log, stderr=log
        )
        log.close()

    async def end(self, by=signal.SIGKILL):
        """The exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(by)
        return await asyncio.wait_for(process.wait(), 20)

    async def wait(self):
        return await asyncio.wait_for(self._process.wait(), 20)

    def log(self):
        return (self._folder / "compiler.log").read_text()


class RouterDouble:
    """Publishes a window twice a second."""

    def __init__(self, bus, operations, tokens_per_step):
        self._bus = bus
        self.operations = operations
        self.tokens_per_step = tokens_per_step
        self.prompt = 100.0

    def window(self):
        shape = TrafficShape(
            requests=20,
            arrival_rate=4.0,
            burstiness=1.0,
            concurrency=4.0,
            prompt_tokens=_flat(self.prompt),
            output_tokens=_flat(50.0),
            tokens_per_step=self.tokens_per_step,
        )
        return TrafficShapeObserved(
            pool=POOL,
            model="chat",
            window_start=dt.datetime.now(dt.UTC),
            window_s=0.5,
            shape=shape,
            operations=tuple(
                Operation(definition=name, share=share) for name, share in self.operations.items()
            ),
            workers=1,
        )

    async def run(self):
        while True:
            with contextlib.suppress(BusError):
                await self._bus.publish(self.window())
            await asyncio.sleep(0.5)


class EvaluatorDouble:
    """Reads what a real evaluator reads, and answers by a table that a seed makes: it measures nothing."""

    def __init__(self, bus, seed=3):
        self._bus = bus
        self._seed = seed
        self.orders = []
        self.workloads = {}
        self.solutions = {}
        self.go = asyncio.Event()
        self.go.set()
        self.pause_after = None

    async def run(self):
        consumption = Consumption(
            durable="evaluator", subject=EvaluateCandidate.wildcard(), ack_wait_s=5, max_attempts=100
        )
        await self._bus.consume(consumption, self._evaluate)

    async def _evaluate(self, delivery):
        order = delivery.message
        await self.go.wait()
        self.orders.append(order)
        if self.pause_after is not None and len(self.orders) >= self.pause_after:
            self.pause_after = None
            self.go.clear()
        self.workloads[order.workload] = Workload.model_validate_json(
            await self._bus.get_object(order.workload)
        )
        solution = Solution.model_validate_json(await self._bus.get_object(order.solution))
        self.solutions[order.candidate_id] = solution
        ratio = random.Random(f"{self._seed} {order.solution}").uniform(0.9, 1.4)
        passed = ratio > 0.95
        await self._bus.publish(
            CandidateEvaluated(
                pool=order.pool,
                search_id=order.search_id,
                candidate_id=order.candidate_id,
                evaluation_id=order.evaluation_id,
                gate=order.until if passed else Gate.G2_CORRECT,
                verdict=Verdict.PASSED if passed else Verdict.FAILED,
                reason="as the table says",
                speedup=Ratio(point=ratio, low=ratio - 0.01, high=ratio + 0.01) if passed else None,
                numerics=Numerics.REORDERED,
                manifest=f"manifest-{order.candidate_id}" if passed else None,
                artifact=f"artifact-{order.candidate_id}" if passed else None,
                cpu_s=0.5,
            )
        )


class Lab:
    """The compiler and its surroundings, and what they said."""

    def __init__(self, compiler, router, evaluator, bus, trust):
        self.compiler = compiler
        self.router = router
        self.evaluator = evaluator
        self.bus = bus
        self.trust = trust
        self.told = []
        self._news = asyncio.Event()

    def of(self, name):
        return [e.data for e in self.told if e.type == f"polymorph.evt.{name}.v1"]

    async def follow(self):
        async for record in self.bus.events(after="0-0"):
            if isinstance(record, StreamRecord):
                self.told.append(record.envelope)
                self._news.set()

    async def until(self, what, timeout_s=60):
        """Waits until `what()` is true; says with the compiler's log what it waited for in vain."""
        try:
            async with asyncio.timeout(timeout_s):
                while not what():
                    self._news.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._news.wait(), 0.2)
        except TimeoutError:
            seen = sorted({e.type for e in self.told})
            raise AssertionError(f"it did not happen; events {seen}\n{self.compiler.log()[-3000:]}") from None

    async def desired(self):
        entry = await self.bus.kv_get("desired", POOL)
        state = DesiredState.model_validate_json(entry.value)
        self.trust.verify(
            state.signature.key_id, state.signed_content(), state.signature.signature, role=Role.PROMOTER
        )
        return state


@pytest.fixture
def names():
    return POOL, GATE_UP, DOWN


@pytest_asyncio.fixture
async def make_lab(nats_server, bus_factory, tmp_path):
    tasks, labs = [], []

    async def make(operations=None, tokens_per_step=None, **settings):
        signer = Signer.load_or_generate(tmp_path / "promoter.key")
        trust = Trust()
        trust.add(signer.public, Role.PROMOTER)
        router = RouterDouble(
            await bus_factory("router"),
            operations or {GATE_UP: 0.5, DOWN: 0.2},
            tokens_per_step or {"8": 1.0},
        )
        evaluator = EvaluatorDouble(await bus_factory("evaluator"))
        compiler = CompilerProcess(tmp_path, nats_server, **settings)
        lab = Lab(compiler, router, evaluator, await bus_factory("gateway"), trust)
        labs.append(lab)
        tasks.extend(asyncio.ensure_future(work) for work in (router.run(), evaluator.run(), lab.follow()))
        await compiler.start()
        return lab

    yield make
    for lab in labs:
        await lab.compiler.end()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
