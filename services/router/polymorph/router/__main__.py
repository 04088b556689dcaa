"""`python -m polymorph.router`."""

import asyncio
import logging
import signal
import sys

import uvloop
from pydantic import ValidationError

from polymorph.bus.errors import Fatal
from polymorph.bus.nats import NatsBus
from polymorph.config.clock import SystemClock
from polymorph.router.app import Router
from polymorph.router.settings import RouterSettings
from polymorph.telemetry.log import configure

_log = logging.getLogger("polymorph.router")


async def _serve(settings: RouterSettings) -> None:
    clock = SystemClock()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    connecting = asyncio.ensure_future(
        NatsBus.connect(settings.nats, f"/polymorph/router/{settings.instance}", clock)
    )
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({connecting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not connecting.done():
        connecting.cancel()
        return
    bus = await connecting
    serving = asyncio.ensure_future(Router(settings, bus, clock).run(stop))
    lost = asyncio.ensure_future(bus.lost())
    await asyncio.wait({serving, lost}, return_when=asyncio.FIRST_COMPLETED)
    for task in (serving, lost):
        if task.done():
            task.result()
        task.cancel()
    await bus.close()


def main() -> int:
    try:
        settings = RouterSettings()
    except ValidationError as error:
        print(f"router: {error}", file=sys.stderr)  # noqa: T201 - logging is not set up yet
        return 2
    configure("router", settings.log_level)
    _log.info("settings %s", settings.masked())
    code = 0
    try:
        uvloop.run(_serve(settings))
    except* Fatal as fatal:
        _log.critical("%s", fatal.exceptions[0])
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
