"""The front of a plain `vllm serve`: its application names the revision, and one of its processes watches the folder.

`plugin.register` adds `HotLoading` to vLLM's application; where this vLLM builds its application elsewhere,
`--middleware polymorph.engine.plain.front.HotLoading` does it by hand.
"""

import asyncio
import contextlib
import functools
import logging
import os
import sys
from pathlib import Path
from typing import Any

from polymorph.engine.flight import FLIGHT_VARIABLE
from polymorph.engine.hooks.hook import HookMissing, expect, expect_parameters, hindrance
from polymorph.engine.launch import EXTENSION
from polymorph.engine.plain.patience import again_s
from polymorph.engine.plain.settings import KERNELS_VARIABLE, PlainSettings
from polymorph.engine.provenance import Application, Receive, RevisionHeader, Scope, Send

_log = logging.getLogger(__name__)
_SERVE = "vllm.entrypoints.cli.serve"
_ENTRY = "vllm.entrypoints.launchers.api_server.entry"
_NAME = f"{__name__}.HotLoading"


class HotLoading:
    """Names the revision in every response; while the application lives, watches the folder where one is named."""

    def __init__(self, app: Application) -> None:
        self._app = RevisionHeader(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        watching = asyncio.create_task(_watch(scope["app"].state))
        try:
            await self._app(scope, receive, send)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


async def _watch(state: Any) -> None:
    """Runs until the engine is dead; whatever tuning does, serving outlives it."""
    try:
        settings = PlainSettings.read()
    except ValueError as error:
        _log.error("no hot loading: %s; serving goes on", error)
        return
    if settings.folder is None:
        return
    from polymorph.engine.plain import server  # noqa: PLC0415 - only where it is asked for

    failures = 0
    while True:
        try:
            await server.serve(settings, state.engine_client, state.args)
        except Exception:  # noqa: BLE001 - it is tried again
            failures += 1
            _log.exception("hot loading begins again in %.0f s; serving goes on", again_s(failures))
            await asyncio.sleep(again_s(failures))
        else:
            return


def probe() -> None:
    """VLLM builds the application of a server in one function, from the arguments of the command line."""
    entry = _entry()
    if entry is None:
        raise HookMissing(f"this vLLM has no {_ENTRY}")
    expect_parameters(expect(entry, "build_app"), "args")


def _entry() -> Any:
    """The module that starts a server, which with `python -m` goes by another name."""
    main = sys.modules.get("__main__")
    started = getattr(getattr(main, "__spec__", None), "name", None)
    return main if started == _ENTRY else sys.modules.get(_ENTRY)


def install() -> None:
    """Where this process serves HTTP: its application gets the middleware, if its engine has our extension."""
    if _SERVE not in sys.modules and _entry() is None:
        return
    reason = hindrance(probe)
    if reason is not None:
        _log.error("no revision in responses, no hot loading: %s; try --middleware %s", reason, _NAME)
        return
    entry = _entry()
    if not hasattr(entry.build_app, "__wrapped__"):
        entry.build_app = _with_middleware(entry.build_app)
    settings = PlainSettings.read()
    if settings.folder is not None and FLIGHT_VARIABLE not in os.environ:
        _record_flights(settings.flights)


def _record_flights(folder: Path) -> None:
    """The engine's processes, which are started after this, record the kernel that they call."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        _log.error("an engine that ends in a kernel will not be told of: %s; set POLYMORPH_STATE", error)
    else:
        os.environ[FLIGHT_VARIABLE] = str(folder)


def _with_middleware(native: Any) -> Any:
    @functools.wraps(native)
    def build_app(args: Any, *others: Any, **named: Any) -> Any:
        ours = getattr(args, "worker_extension_cls", "") == EXTENSION or KERNELS_VARIABLE in os.environ
        if ours and _NAME not in args.middleware:
            # Where the function has returned, the application may hold its middleware already.
            args.middleware = [*args.middleware, _NAME]
        return native(args, *others, **named)

    return build_app
