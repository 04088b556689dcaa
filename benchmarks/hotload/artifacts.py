"""The kernels that are swapped: of the catalogue and of the compiler's agents, built, signed and put where workers look."""

import asyncio
import random
from collections.abc import Iterable, Iterator

from benchmarks.hotload.house import House

from polymorph.compiler.domain.agents.proposer import propose_for
from polymorph.config.folders import cache_folder
from polymorph.events.values import KernelBinding, Numerics
from polymorph.kernels.build import BuildFailed
from polymorph.kernels.catalogue import solutions
from polymorph.kernels.catalogue.artifacts import built
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.isa import Cpu, Isa
from polymorph.kernels.schema import Definition, Manifest, Solution
from polymorph.kernels.signing import sign_manifest
from polymorph.kernels.toolchain import detect_toolchain, run_command


def operation(definition: str) -> str:
    """The operation that a definition is of, without its sizes."""
    return definition_named(definition).op_type


def one_each(definitions: Iterable[str]) -> list[str]:
    """The first definition of each operation."""
    chosen: dict[str, str] = {}
    for name in definitions:
        chosen.setdefault(operation(name), name)
    return list(chosen.values())


async def kernels_for(house: House, definition: str, count: int, max_m: int) -> tuple[KernelBinding, ...]:
    """At most `count` distinct kernels for one definition, each for M from 1 to `max_m`."""
    made: dict[str, KernelBinding] = {}
    for solution in _wanted(definition_named(definition), max_m):
        binding = await _signed(house, solution, max_m)
        if binding is not None:
            made.setdefault(binding.artifact, binding)
        if len(made) == count:
            break
    return tuple(made.values())


def _wanted(definition: Definition, max_m: int) -> Iterator[Solution]:
    isa = Cpu.read().isa
    yield from (each for each in solutions(definition, isa) if _covers(each, max_m))
    proposer = propose_for(definition, 1, max_m, isa, rng=random.Random(0))
    if proposer is not None:
        yield from proposer.next([])


def _covers(solution: Solution, max_m: int) -> bool:
    return solution.x_polymorph.min_m == 1 and solution.x_polymorph.max_m >= max_m


async def _signed(house: House, solution: Solution, max_m: int) -> KernelBinding | None:
    """None where the solution does not build here."""
    toolchain = detect_toolchain()
    try:
        made = await asyncio.to_thread(built, solution, cache_folder() / "catalogue", toolchain, run_command)
    except BuildFailed:
        return None
    definition = definition_named(solution.definition)
    artifact = await house.bus.put_object(made.path.read_bytes())
    manifest = Manifest(
        artifact=artifact,
        definition=definition.name,
        definition_digest=definition.digest(),
        solution=solution.digest(),
        hardware=Cpu.read().fingerprint,
        isa=_tier(solution),
        toolchain=toolchain.digest,
        layout=made.layout,
        numerics=Numerics(solution.x_polymorph.numerics),
        min_m=1,
        max_m=max_m,
        evidence="0" * 64,
    )
    signed = await house.bus.put_object(sign_manifest(manifest, house.evaluator).canonical())
    return KernelBinding(
        definition=definition.name,
        min_m=1,
        max_m=max_m,
        manifest=signed,
        artifact=artifact,
        numerics=manifest.numerics,
    )


def _tier(solution: Solution) -> str:
    named = solution.x_polymorph.isa
    return named if named in Isa.__members__ else Isa.GENERIC.name
