"""`polymorph kernels`: what a plain `vllm serve` runs, by a folder (docs/adoption.md)."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from polymorph.engine.plain import desire
from polymorph.engine.plain.desire import Approval, NotDesirable
from polymorph.engine.plain.folder import KernelFolder
from polymorph.events.state import DesiredState
from polymorph.events.values import Numerics
from polymorph.kernels.isa import Isa, detect_isa
from polymorph.kernels.schema import SignedManifest
from polymorph.kernels.signing import Role, Signer, Trust

EVALUATOR_KEY, PROMOTER_KEY, TRUST = "evaluator.pem", "promoter.pem", "trust.json"
_ANY_M = 1 << 30


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polymorph kernels",
        description="Kernels of a plain vllm serve.",
        epilog="exit codes: 0 done, 1 the server does not run what is desired, 2 refused, 3 no server answers",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    keygen = commands.add_parser("keygen", help="make two keys, and the file of whom a server trusts")
    keygen.add_argument("keys", type=Path, help="a folder that only you may read")
    sign = commands.add_parser(
        "sign", help="say of a library, in the evaluator's place, that it may run here"
    )
    sign.add_argument("library", type=Path)
    sign.add_argument("--definition", required=True, help="as status.json lists them, gemm_n512_k256_f32 say")
    sign.add_argument("--key", type=Path, required=True, help=f"the {EVALUATOR_KEY} of keygen")
    sign.add_argument("--numerics", choices=[str(each) for each in Numerics], default=str(Numerics.REORDERED))
    sign.add_argument("--isa", choices=[each.name for each in Isa], default=detect_isa().name)
    sign.add_argument("--min-m", type=int, default=1, help="(%(default)s)")
    sign.add_argument("--max-m", type=int, default=_ANY_M, help="(%(default)s)")
    sign.add_argument("--layout", help="names the packing of the weight; a library with pm_pack needs it")
    sign.add_argument("--toolchain", default="by hand", help="(%(default)s)")
    sign.add_argument("--output", type=Path, help="(default: LIBRARY.json)")
    put = commands.add_parser("put", help="have a kernel run beside those that do")
    put.add_argument("folder", type=Path, help="POLYMORPH_KERNELS of the server")
    put.add_argument("--manifest", type=Path, required=True)
    put.add_argument("--library", type=Path, required=True)
    put.add_argument("--min-m", type=int, help="(default: as the manifest allows)")
    put.add_argument("--max-m", type=int, help="(default: as the manifest allows)")
    clear = commands.add_parser("clear", help="have the engine's own code run again")
    clear.add_argument("folder", type=Path)
    for command in (put, clear):
        command.add_argument("--key", type=Path, required=True, help=f"the {PROMOTER_KEY} of keygen")
        command.add_argument("--pool", help="(default: as the server says)")
    status = commands.add_parser("status", help="say what the server runs")
    status.add_argument("folder", type=Path)
    status.add_argument("--json", action="store_true", dest="as_json")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Raises nothing for what an operator may get wrong: one line says what would be right."""
    options = _parser().parse_args(arguments)
    does: dict[str, Callable[[argparse.Namespace], int]] = {
        "keygen": _keygen, "sign": _sign, "put": _put, "clear": _clear, "status": _status,
    }  # fmt: skip
    try:
        return does[options.command](options)
    except (OSError, ValueError, TypeError) as error:
        print(f"polymorph kernels: {error}", file=sys.stderr)
        return 2


def _keygen(options: argparse.Namespace) -> int:
    folder: Path = options.keys
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    trust = Trust()
    trust.add(Signer.load_or_generate(folder / EVALUATOR_KEY).public, Role.EVALUATOR)
    trust.add(Signer.load_or_generate(folder / PROMOTER_KEY).public, Role.PROMOTER)
    trust.save(folder / TRUST)
    print(f"{folder / EVALUATOR_KEY} signs manifests, {folder / PROMOTER_KEY} what is desired")
    print(f"start the server with POLYMORPH_TRUST_FILE={(folder / TRUST).resolve()}")
    return 0


def _sign(options: argparse.Namespace) -> int:
    approval = Approval(
        definition=options.definition,
        numerics=Numerics(options.numerics),
        isa=Isa[options.isa],
        min_m=options.min_m,
        max_m=options.max_m,
        layout=options.layout,
        toolchain=options.toolchain,
    )
    signed = approval.signed(options.library.read_bytes(), Signer.load(options.key))
    output: Path = options.output or Path(f"{options.library}.json")
    output.write_bytes(signed.canonical())
    print(output)
    return 0


def _put(options: argparse.Namespace) -> int:
    try:
        signed = SignedManifest.model_validate_json(options.manifest.read_bytes())
    except ValidationError as error:
        raise NotDesirable(f"{options.manifest} is no signed manifest: make it with `sign`") from error
    state = desire.put(
        KernelFolder(options.folder),
        Signer.load(options.key),
        signed,
        options.library.read_bytes(),
        pool=options.pool,
        min_m=options.min_m,
        max_m=options.max_m,
    )
    _say(state)
    return 0


def _clear(options: argparse.Namespace) -> int:
    _say(desire.clear(KernelFolder(options.folder), Signer.load(options.key), pool=options.pool))
    return 0


def _say(state: DesiredState) -> None:
    print(
        f"generation {state.generation} of {state.pool}: {state.stable.revision}, "
        f"{len(state.stable.kernels)} kernels; `polymorph kernels status` tells when it runs"
    )


def _status(options: argparse.Namespace) -> int:
    status = KernelFolder(options.folder).status()
    if status is None:
        print(f"no server has written {options.folder / 'status.json'}", file=sys.stderr)
        return 3
    if options.as_json:
        print(status.model_dump_json(indent=2))
    else:
        print("\n".join(status.lines()))
    return 0 if status.state == "converged" else 1
