"""The composition root of the gateway."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import FastAPI

from polymorph.config.clock import Clock
from polymorph.gateway.adapters.inbound import Receive, Scope, Send
from polymorph.gateway.adapters.link import Connected, Link
from polymorph.gateway.adapters.registry import Registry
from polymorph.gateway.adapters.router import RouterClient
from polymorph.gateway.adapters.routes import COMPLETIONS, add_routes
from polymorph.gateway.adapters.static import StaticWorkers
from polymorph.gateway.adapters.telegraph import Telegraph
from polymorph.gateway.adapters.upstream import Upstreams
from polymorph.gateway.adapters.watching import Watching
from polymorph.gateway.domain.fleet import Fleet, FleetRules
from polymorph.gateway.handlers import Forward
from polymorph.gateway.settings import GatewaySettings

_log = logging.getLogger(__name__)
_AGAIN_S = 1.0


class Gateway:
    """Everything wired together. `stop` ends event streams; requests in flight are the server's to drain."""

    def __init__(
        self, settings: GatewaySettings, connect: Callable[[], Awaitable[Connected]], clock: Clock
    ) -> None:
        self._stopping = asyncio.Event()
        self._link = Link(connect)
        self._upstreams = Upstreams(
            idle_s=settings.upstream_idle_s, connect_timeout_s=settings.connect_timeout_s
        )
        self._telegraph = Telegraph(self._link)
        self._router = RouterClient(
            self._link, first_answer_s=settings.router_first_answer_s, probe_s=settings.router_probe_s
        )
        self._fleet = Fleet(FleetRules(settings.suspect_after_s, settings.forget_after_s))
        self._registry = self._make_registry(settings, clock)
        self.app = FastAPI(
            title="Polymorph", docs_url=None, redoc_url=None, openapi_url=None, lifespan=self._lifespan
        )
        self._forward = Forward(
            self._fleet,
            self._registry,
            self._router,
            upstreams=self._upstreams,
            telegraph=self._telegraph,
            clock=clock,
            max_body_bytes=settings.max_body_bytes,
            attempts=settings.attempts,
        )
        watching = Watching(self._link, settings.event_heartbeat_s, self._stopping)
        add_routes(self.app, self._forward, self._fleet, watching)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application; completions skip the layers of the framework, which they do not use."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in COMPLETIONS:
            await self._forward(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def stop(self) -> None:
        self._stopping.set()

    def _make_registry(self, settings: GatewaySettings, clock: Clock) -> Registry:
        return Registry(
            self._fleet,
            self._link,
            self._upstreams,
            StaticWorkers(settings.workers, clock),
            clock,
            file=settings.data_dir / f"gateway-{settings.instance}-workers.json",
            probe_interval_s=settings.probe_interval_s,
            probe_timeout_s=settings.probe_timeout_s,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        del app
        self._registry.load()
        background = [
            asyncio.create_task(_for_ever(work))
            for work in (
                self._link.run,
                self._registry.watch,
                self._registry.probe,
                self._registry.save,
                self._telegraph.run,
            )
        ]
        try:
            yield
        finally:
            self._stopping.set()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self._router.close()
            await self._telegraph.flush()
            await self._link.close()
            self._upstreams.close()


async def _for_ever(work: Callable[[], Awaitable[None]]) -> None:
    """Keeps a background task going: requests are served on what it keeps, and nobody else would see it end."""
    while True:
        try:
            await work()
        except Exception:  # noqa: BLE001 - the loop that keeps the others
            _log.exception("%s ended and starts again in %g s", work.__qualname__, _AGAIN_S)
        await asyncio.sleep(_AGAIN_S)
