"""`python -m polymorph.evaluator`."""

import asyncio
import logging
import signal
import sys

import uvloop
from pydantic import ValidationError

from polymorph.bus.errors import Fatal
from polymorph.bus.nats import NatsBus
from polymorph.config.clock import SystemClock
from polymorph.evaluator.app import Evaluator
from polymorph.evaluator.settings import EvaluatorSettings
from polymorph.kernels.toolchain import NoCompiler
from polymorph.sandbox.isolation import IsolationTooWeak
from polymorph.telemetry.log import configure

_log = logging.getLogger("polymorph.evaluator")


async def _serve(settings: EvaluatorSettings) -> None:
    clock = SystemClock()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    connecting = asyncio.ensure_future(
        NatsBus.connect(settings.nats, f"/polymorph/evaluator/{settings.instance}", clock)
    )
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({connecting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not connecting.done():
        connecting.cancel()
        return
    bus = await connecting
    serving = asyncio.ensure_future(Evaluator(settings, bus, clock).run(stop))
    lost = asyncio.ensure_future(bus.lost())
    await asyncio.wait({serving, lost}, return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    lost_task, serving_task = lost.done() and lost, serving
    await asyncio.wait({serving_task}, timeout=10)
    for task in (lost_task, serving_task):
        if task and task.done():
            task.result()
    lost.cancel()
    serving.cancel()
    await bus.close()


def main() -> int:
    try:
        settings = EvaluatorSettings()
        settings.isolation()
    except (ValidationError, ValueError) as error:
        print(f"evaluator: {error}", file=sys.stderr)  # noqa: T201 - logging is not set up yet
        return 2
    configure("evaluator", settings.log_level)
    _log.info("settings %s", settings.masked())
    code = 0
    try:
        uvloop.run(_serve(settings))
    except* (Fatal, IsolationTooWeak, NoCompiler) as fatal:
        _log.critical("%s", fatal.exceptions[0])
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
