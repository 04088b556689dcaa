"""The processes of embedded mode and how each is run."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from polymorph.bus.credentials import Credentials, Role
from polymorph.embedded import secrets
from polymorph.embedded.child import ChildSpec
from polymorph.embedded.folder import DataFolder
from polymorph.embedded.options import UpOptions
from polymorph.embedded.probe import http_status, metric_sum
from polymorph.embedded.servers import nats_server_spec, valkey_spec
from polymorph.engine.launch import EngineLaunch
from polymorph.events.subjects import pool_id

WORKER_DRAIN_S = 60.0
GATEWAY_DRAIN_S = 60.0
USUAL_ENGINE_START_S = 180.0
_REQUESTS = frozenset({"vllm:num_requests_running", "vllm:num_requests_waiting"})
_RANKS = {"gateway": 0, "compiler": 1, "evaluator": 1, "worker": 2, "router": 3}


class Services:
    """Builds the specs of all processes for one start."""

    def __init__(self, options: UpOptions, folder: DataFolder, credentials: Credentials) -> None:
        self._options = options
        self._folder = folder
        self._credentials = credentials
        self.workers = [f"worker-{number}" for number in range(options.workers)]
        names = ["nats", "nats-monitor", "valkey", "router", "compiler", "evaluator", *self.workers]
        self.ports = folder.ports(names)
        self.pool = pool_id(options.served_name)
        self._engine = EngineLaunch(model=options.model.resolve())

    @property
    def nats_url(self) -> str:
        return f"nats://127.0.0.1:{self.ports['nats']}"

    @property
    def monitor_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['nats-monitor']}"

    def stages(self, provision: Callable[[], Awaitable[None]]) -> list[list[ChildSpec]]:
        """What starts together; each stage waits for the one before."""
        nats = nats_server_spec(self._folder, self.ports, self._credentials, provision)
        valkey = valkey_spec(self._folder, self.ports["valkey"])
        tuning = [[self._compiler(), self._evaluator()]] if self._options.tune else []
        workers = [self._worker(name) for name in self.workers]
        return [[nats, valkey], [self._router(), self._gateway()], workers, *tuning]

    def facts(self) -> dict[str, Any]:
        """What `polymorph status` and tools need to know beside the processes."""
        return {
            "url": f"http://127.0.0.1:{self._options.port}",
            "nats": self.nats_url,
            "model": self._options.served_name,
            "pool": self.pool,
            "mode": self._options.mode,
            "tune": self._options.tune,
            "ports": self.ports,
        }

    def _spec(
        self,
        name: str,
        settings: Mapping[str, Any],
        *,
        service: str | None = None,
        ready: Callable[[], Awaitable[bool]],
        where: str,
        extra: Mapping[str, str] | None = None,
        drain_s: float = 15.0,
        **more: Any,
    ) -> ChildSpec:
        service = service or name
        data = self._folder.service(name)
        data.mkdir(parents=True, exist_ok=True)
        nats = self._credentials.nats_settings(cast("Role", service), self.nats_url)
        values: dict[str, Any] = {
            "instance": name,
            "data_dir": str(data.absolute()),
            "nats": {
                "url": nats.url,
                "user": nats.user,
                "password": nats.password.get_secret_value() if nats.password else None,
                "inbox_prefix": nats.inbox_prefix,
            },
            **settings,
        }
        return ChildSpec(
            name=name,
            command=(sys.executable, "-m", f"polymorph.{service}"),
            environment={**_clean_environment(), **_variables(service, values), **(extra or {})},
            log=self._folder.logs / f"{name}.log",
            ready=ready,
            where=where,
            drain_s=drain_s,
            drain_rank=_RANKS[service],
            **more,
        )

    def _router(self) -> ChildSpec:
        port = self.ports["router"]
        settings = {"health_port": port, "redis_url": f"redis://127.0.0.1:{self.ports['valkey']}/0"}
        return self._spec(
            "router", settings, ready=partial(_ready, port, "/readyz"), where=f"health port {port}"
        )

    def _gateway(self) -> ChildSpec:
        port = self._options.port
        return self._spec(
            "gateway",
            {"host": "127.0.0.1", "port": port, "drain_timeout_s": GATEWAY_DRAIN_S},
            ready=partial(_ready, port, "/healthz"),
            where=f"http://127.0.0.1:{port}/v1",
            drain_s=GATEWAY_DRAIN_S + 5,
            in_flight=self._in_flight,
        )

    async def _in_flight(self) -> int | None:
        """Requests in the engines: a gateway that drains takes no connection, and cannot be asked any more."""
        counts = await asyncio.gather(*(metric_sum(self.ports[name], _REQUESTS) for name in self.workers))
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def _worker(self, name: str) -> ChildSpec:
        port = self.ports[name]
        settings: dict[str, Any] = {
            "worker_id": name,
            "port": port,
            "model": str(self._options.model.resolve()),
            "served_model_name": self._options.served_name,
            "pool": self.pool,
            "kv_gib": self._options.kv_gib,
            "trust_file": str((self._folder.keys / secrets.TRUST).absolute()),
            "drain_timeout_s": WORKER_DRAIN_S,
        }
        settings.update(self._context("max_model_len"))
        return self._spec(
            name,
            settings,
            service="worker",
            ready=partial(_ready, port, "/health"),
            where=f"vLLM on port {port}",
            extra=self._engine.environment(),
            drain_s=WORKER_DRAIN_S + 10,
            usual_start_s=USUAL_ENGINE_START_S,
        )

    def _context(self, name: str) -> dict[str, int]:
        """The context, where one was asked for: worker and evaluator share the compiled graph when it is the same."""
        length = self._options.max_model_len
        return {} if length is None else {name: length}

    def _compiler(self) -> ChildSpec:
        port = self.ports["compiler"]
        settings: dict[str, Any] = {
            "health_port": port,
            "database_url": self._folder.database_url,
            "signing_key": str((self._folder.keys / secrets.PROMOTER_KEY).absolute()),
        }
        if self._options.mode is not None:
            settings["mode"] = self._options.mode
        return self._spec(
            "compiler", settings, ready=partial(_ready, port, "/readyz"), where=f"health port {port}"
        )

    def _evaluator(self) -> ChildSpec:
        port = self.ports["evaluator"]
        settings = {
            "health_port": port,
            "model": str(self._options.model.resolve()),
            "signing_key": str((self._folder.keys / secrets.EVALUATOR_KEY).absolute()),
            "host_lease": "auto",
            **self._context("engine_max_model_len"),
        }
        return self._spec(
            "evaluator",
            settings,
            ready=partial(_ready, port, "/readyz"),
            where=f"health port {port}",
            extra=self._engine.environment(),
        )


async def _ready(port: int, path: str) -> bool:
    return await http_status(port, path) == 200


def _variables(service: str, values: Mapping[str, Any]) -> dict[str, str]:
    prefix = f"POLYMORPH_{service.upper()}_"
    return {
        prefix + key.upper(): value if isinstance(value, str) else json.dumps(value)
        for key, value in values.items()
    }


def _clean_environment() -> dict[str, str]:
    """This process's environment, with logs unbuffered and the interpreter's folder first on PATH."""
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
