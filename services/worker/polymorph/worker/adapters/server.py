"""vLLM's own OpenAI server application, under our uvicorn: we decide when it stops."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from polymorph.engine.launch import EngineLaunch
from polymorph.worker.adapters.engine import Engine

_POLL_S = 0.05


class PortTaken(OSError):
    """The port that the settings name is somebody else's."""


def listen(host: str, port: int) -> socket.socket:
    """Takes the port before the model loads, so that a taken one is told in a second and not in minutes.

    Raises:
        PortTaken: somebody listens there.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror}; name another port") from error
    sock.set_inheritable(True)
    return sock


class HttpServer:
    """Serves until `stop`; then takes no new connection and lets those in flight end."""

    def __init__(self, app: Any, sock: socket.socket, drain_s: float) -> None:
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=max(1, round(drain_s))
        )
        self._server = _Server(config)
        self._sock = sock

    async def run(self) -> None:
        await self._server.serve(sockets=[self._sock])

    async def started(self) -> None:
        while not self._server.started:  # noqa: ASYNC110 - uvicorn tells by a flag
            await asyncio.sleep(_POLL_S)

    @property
    def connections(self) -> int:
        return len(self._server.server_state.tasks)

    def stop(self) -> None:
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Leaves signals to the worker."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def application(engine: Engine, launch: EngineLaunch) -> Any:
    """The FastAPI application of vLLM over `engine`, with the arguments that `vllm serve` would have had."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state  # noqa: PLC0415
    from vllm.entrypoints.launchers.app import build_app  # noqa: PLC0415
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = parser.parse_args(["--model", str(launch.model)])
    for name, value in launch.plain_arguments().items():
        setattr(arguments, name, [value] if name == "served_model_name" else value)
    arguments.disable_fastapi_docs = True
    tasks = await engine.llm.get_supported_tasks()
    app = build_app(arguments, tasks, engine.llm.model_config)
    await init_app_state(engine.llm, app.state, arguments, tasks)
    return app
