"""The command `polymorph`."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from polymorph.embedded.folder import DEFAULT_DATA, DataFolder, StartRefused
from polymorph.embedded.options import DEFAULT_MODEL, UpOptions
from polymorph.embedded.status import down, status

_OF_THEIR_OWN = {
    name: f"polymorph.embedded.{name}"  # imported when it is asked for, which keeps the others quick
    for name in ("doctor", "kernels", "capture")
}
_EXIT_CODES = "exit codes: 0 done, 1 not all ready, 2 refused (one line says why), 3 nothing runs"


def _version() -> str:
    try:
        return version("polymorph-inference")
    except PackageNotFoundError:
        return "of a source tree that is not installed"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polymorph", description="LLM serving that keeps tuning itself.", epilog=_EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start embedded mode: NATS, Valkey, SQLite and the five services")
    up.add_argument(
        "--model", type=Path, default=DEFAULT_MODEL, help="a folder that vLLM can serve (%(default)s)"
    )
    up.add_argument("--served-model-name", help="the name that clients send (default: the folder's name)")
    up.add_argument("--workers", type=int, default=1)
    up.add_argument("--port", type=int, default=8000)
    up.add_argument("--data", type=Path, default=DEFAULT_DATA, help="where everything is kept (%(default)s)")
    up.add_argument(
        "--mode", help="observe, recommend, canary or pinned (default: as set before; observe at first)"
    )
    up.add_argument("--kv-gib", type=int, default=1, help="KV cache of each worker in GiB (%(default)s)")
    up.add_argument("--max-model-len", type=int, help="context in tokens (default: the worker's)")
    up.add_argument("--no-tune", action="store_true", help="leave compiler and evaluator out: plain serving")
    for name, text in (("status", "say what runs"), ("down", "drain and stop")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--data", type=Path, default=DEFAULT_DATA, help="(%(default)s)")
        if name == "status":
            command.add_argument("--json", action="store_true", dest="as_json")
    plan = commands.add_parser(
        "plan", help="say what each worker would do to run a revision; nothing is done"
    )
    plan.add_argument("file", type=Path, help="a revision, or engine settings alone, as JSON or YAML")
    plan.add_argument("--pool", help="(default: every pool)")
    plan.add_argument("--data", type=Path, default=DEFAULT_DATA, help="(%(default)s)")
    plan.add_argument(
        "--nats", help="a server instead of a data folder; its password in POLYMORPH_NATS_PASSWORD"
    )
    plan.add_argument("--user", help="the server's user")
    plan.add_argument("--json", action="store_true", dest="as_json")
    commands.add_parser("capture", help="real inputs of a slot, as workloads to measure on", add_help=False)
    commands.add_parser("kernels", help="what a plain vllm serve runs, by a folder", add_help=False)
    commands.add_parser("doctor", help="check what a start would trip over", add_help=False)
    return parser


def _up(options: argparse.Namespace) -> int:
    wanted = UpOptions(
        model=options.model,
        workers=options.workers,
        port=options.port,
        data=options.data,
        mode=options.mode,
        served_model_name=options.served_model_name,
        kv_gib=options.kv_gib,
        max_model_len=options.max_model_len,
        tune=not options.no_tune,
    )
    from polymorph.embedded.up import up  # noqa: PLC0415 - keeps status, down and doctor quick

    up(wanted)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] and given[0] in _OF_THEIR_OWN:
        return int(importlib.import_module(_OF_THEIR_OWN[given[0]]).main(given[1:]))
    options = _parser().parse_args(given)
    try:
        if options.command == "up":
            return _up(options)
        folder = DataFolder(options.data)
        if options.command == "plan":
            from polymorph.embedded.plan import plan  # noqa: PLC0415 - as above
            from polymorph.embedded.where import Where  # noqa: PLC0415

            where = Where(folder, options.nats, options.user)
            return plan(where, options.file, options.pool, as_json=options.as_json)
        return status(folder, as_json=options.as_json) if options.command == "status" else down(folder)
    except StartRefused as refusal:
        print(f"polymorph: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
