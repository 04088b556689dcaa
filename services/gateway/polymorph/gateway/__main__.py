"""`python -m polymorph.gateway`."""

import logging
import math
import signal
import sys
from types import FrameType

import uvicorn
import uvloop
from pydantic import ValidationError

from polymorph.bus.nats import NatsBus
from polymorph.config.clock import SystemClock
from polymorph.gateway.app import Gateway
from polymorph.gateway.settings import GatewaySettings
from polymorph.telemetry.log import configure

_log = logging.getLogger("polymorph.gateway")


class _Server(uvicorn.Server):
    """Lets watchers of events go first when it is told to end, so that only requests are waited for."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._gateway.stop()
        super().handle_exit(sig, frame)


async def _serve(settings: GatewaySettings) -> None:
    clock = SystemClock()

    async def connect() -> NatsBus:
        return await NatsBus.connect(settings.nats, f"/polymorph/gateway/{settings.instance}", clock)

    gateway = Gateway(settings, connect, clock)
    config = uvicorn.Config(
        gateway,
        host=settings.host,
        port=settings.port,
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=4096,
        timeout_keep_alive=settings.client_keep_alive_s,
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s),
    )
    await _Server(config, gateway).serve()


def main() -> int:
    try:
        settings = GatewaySettings()
    except ValidationError as error:
        print(f"gateway: {error}", file=sys.stderr)  # noqa: T201 - logging is not set up yet
        return 2
    configure("gateway", settings.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    _log.info("settings %s", settings.masked())
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _drained)
    uvloop.run(_serve(settings))
    return 0


def _drained(signum: int, frame: FrameType | None) -> None:
    """The server raises the signal anew once it has drained; by then there is nothing left to do."""
    del signum, frame


if __name__ == "__main__":
    sys.exit(main())
