"""`python -m polymorph.compiler`."""

import asyncio
import logging
import signal
import sys

import uvloop
from pydantic import ValidationError

from polymorph.bus.errors import Fatal
from polymorph.bus.nats import NatsBus
from polymorph.compiler.app import Compiler, open_record
from polymorph.compiler.domain.search_agents import Agents
from polymorph.compiler.settings import CompilerSettings
from polymorph.config.clock import SystemClock
from polymorph.kernels.isa import detect_isa, hardware_class
from polymorph.kernels.signing import Signer
from polymorph.telemetry.log import configure

_log = logging.getLogger("polymorph.compiler")
_STOP_S = 10.0


async def _serve(settings: CompilerSettings, signer: Signer) -> None:
    """Works until a signal comes; the servers may come later than this process."""
    clock = SystemClock()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    source = f"/polymorph/compiler/{settings.instance}"
    async with asyncio.TaskGroup() as tasks:
        work = tasks.create_task(_work(settings, signer, clock, source, stop))
        stopping = tasks.create_task(stop.wait())
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({work}, timeout=_STOP_S)
        work.cancel()
        stopping.cancel()


async def _work(
    settings: CompilerSettings, signer: Signer, clock: SystemClock, source: str, stop: asyncio.Event
) -> None:
    bus = await NatsBus.connect(settings.nats, source, clock)
    database = await open_record(settings, clock)
    compiler = Compiler(
        settings,
        bus,
        clock,
        database,
        source=source,
        hardware=hardware_class() if settings.hardware == "auto" else settings.hardware,
        signer=signer,
        proposers=Agents(detect_isa()),
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            lost = tasks.create_task(bus.lost())
            await compiler.run(stop)
            lost.cancel()
    finally:
        await database.close()
        await bus.close()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def main() -> int:
    """2: the configuration is wrong; 1: going on would do harm."""
    try:
        settings = CompilerSettings()
        signer = Signer.load(settings.signing_key)
    except (ValidationError, ValueError, TypeError, OSError) as error:
        print(f"compiler: {error}", file=sys.stderr)  # noqa: T201 - logging is not set up yet
        return 2
    configure("compiler", settings.log_level)
    _log.info("settings %s", settings.masked())
    code = 0
    try:
        uvloop.run(_serve(settings, signer))
    except* Fatal as fatal:
        _log.critical("%s", _first(fatal))
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
