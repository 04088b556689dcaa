"""`polymorph capture`: asks workers for real inputs of a slot, and says where they lie."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from polymorph.bus.errors import BusError
from polymorph.embedded.capture_asking import ask, told
from polymorph.embedded.folder import DEFAULT_DATA, DataFolder, StartRefused
from polymorph.embedded.where import Where, connected, registered
from polymorph.events.requests import CaptureInputs
from polymorph.kernels.definitions import SLOTS, definition_named
from polymorph.workloads import shelf

_SOURCE = "/polymorph/capture/0"
_BUDGET = {
    "calls": ("the last so many calls are kept", 8),
    "every": ("one call in so many", 1),
    "min-m": ("tokens of a call, at least", 1),
    "max-m": ("tokens of a call, at most", 1 << 30),
    "seconds": ("how long to listen", 5.0),
    "max-mib": ("of inputs in all", 16),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polymorph capture",
        description="Real inputs of operations, as workloads to measure on. They derive from users' text: a worker "
        "gives them where its configuration says `capture: content`, and they expire after a day.",
        epilog="exit codes: 0 done, 1 not all was captured, 2 refused (one line says why), 3 no worker",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    take = commands.add_parser("take", help="listen to workers for some seconds, and keep what came")
    take.add_argument("what", help=f"a slot ({', '.join(SLOTS)}) or a definition, gemm_n512_k256_f32 say")
    take.add_argument("--worker", help="(default: every worker of the pool)")
    for name, (text, default) in _BUDGET.items():
        take.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (%(default)s)")
    listing = commands.add_parser("list", help="what was captured and has not expired")
    listing.add_argument("--definition")
    for command in (take, listing):
        command.add_argument("--pool", help="(default: every pool)")
        command.add_argument("--data", type=Path, default=DEFAULT_DATA, help="(%(default)s)")
        command.add_argument(
            "--nats", help="a server instead of a data folder; its password in POLYMORPH_NATS_PASSWORD"
        )
        command.add_argument("--user", help="the server's user")
        command.add_argument("--json", action="store_true", dest="as_json")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Raises nothing for what an operator may get wrong: one line says what would be right."""
    options = _parser().parse_args(arguments)
    where = Where(DataFolder(options.data), options.nats, options.user)
    try:
        wanted = wanted_of(options) if options.command == "take" else None
        return asyncio.run(_take(where, options, wanted) if wanted else _list(where, options))
    except StartRefused as refusal:
        print(f"polymorph capture: {refusal}", file=sys.stderr)
        return 2
    except (BusError, OSError) as error:
        print(f"polymorph capture: the bus does not answer: {error}", file=sys.stderr)
        return 2


def wanted_of(options: argparse.Namespace) -> CaptureInputs:
    """The request, for a worker and a definition still to be named.

    Raises:
        StartRefused: what is neither a slot nor a definition, or a budget that no worker takes.
    """
    if options.what not in SLOTS:
        try:
            definition_named(options.what)
        except ValueError as error:
            raise StartRefused(f"{error}; or name a slot: {', '.join(SLOTS)}") from error
    if options.min_m > options.max_m:
        raise StartRefused(f"--min-m {options.min_m} is more than --max-m {options.max_m}")
    try:
        return CaptureInputs(
            worker_id="",
            definition=options.what,
            calls=options.calls,
            every=options.every,
            min_m=options.min_m,
            max_m=options.max_m,
            seconds=options.seconds,
            max_mib=options.max_mib,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]).replace("_", "-")
        raise StartRefused(f"--{name} {first['input']}: {first['msg'].lower()}") from error


async def _take(where: Where, options: argparse.Namespace, wanted: CaptureInputs) -> int:
    async with connected(where.settings(), _SOURCE) as bus:
        records = [
            each for each in await registered(bus, options.pool) if options.worker in {None, each.worker_id}
        ]
        if not records:
            named = f" {options.worker}" if options.worker else ""
            print(f"no worker{named} is registered{f' in pool {options.pool}' if options.pool else ''}")
            return 3
        asked = await asyncio.gather(*(ask(bus, each, wanted) for each in records))
    outcomes = [outcome for each in asked for outcome in each]
    if options.as_json:
        print(json.dumps([outcome.document() for outcome in outcomes]))
    else:
        print("\n".join(line for outcome in outcomes for line in outcome.lines()))
    return 0 if all(outcome.captured for outcome in outcomes) else 1


async def _list(where: Where, options: argparse.Namespace) -> int:
    async with connected(where.settings(), _SOURCE) as bus:
        found = await shelf.standing(bus, pool=options.pool, definition=options.definition)
    if options.as_json:
        print(json.dumps([each.model_dump(mode="json") for each in found]))
    else:
        print("\n".join(f"{each.worker_id}: {told(each)}" for each in found) or "nothing is captured now")
    return 0
