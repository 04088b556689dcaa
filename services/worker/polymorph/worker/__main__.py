"""`python -m polymorph.worker`."""

import asyncio
import logging
import signal
import sys

import uvloop
from pydantic import ValidationError

from polymorph.bus.errors import Fatal
from polymorph.config.clock import SystemClock
from polymorph.telemetry.log import configure
from polymorph.worker.adapters.server import PortTaken
from polymorph.worker.app import Worker
from polymorph.worker.settings import WorkerSettings

_log = logging.getLogger("polymorph.worker")


async def _serve(settings: WorkerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await Worker(settings, SystemClock()).run(stop)


def main() -> int:
    try:
        settings = WorkerSettings()
        settings.check()
    except (ValidationError, ValueError) as error:
        print(f"worker: {error}", file=sys.stderr)  # noqa: T201 - logging is not set up yet
        return 2
    configure("worker", settings.log_level)
    _log.info("settings %s", settings.masked())
    try:
        uvloop.run(_serve(settings))
    except PortTaken as error:
        _log.critical("%s", error)
        return 2
    except Fatal as error:
        _log.critical("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
