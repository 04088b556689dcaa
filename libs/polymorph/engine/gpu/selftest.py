"""Tries a kernel against the reference on the device, for the buckets that it is to serve; this also compiles it.

`in_process` does so in a process with a CUDA context of its own: a kernel that faults there takes nothing with it.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from polymorph.engine.gpu import ops, reference
from polymorph.engine.gpu.artifact import TritonKernel, load
from polymorph.engine.gpu.counters import Counters
from polymorph.engine.gpu.slots import SHORT, Entry, SlotTable, Table, definition_name
from polymorph.kernels.buckets import UPPER_BOUNDS, lower_bound

_LIBRARIES = Path(__file__).parents[3]
_MOST_ROWS = 64


class SelfTestFailed(RuntimeError):
    """A kernel that computed something else than its definition, or did not come back."""


@dataclass(frozen=True)
class Case:
    """What to try: sizes are the definition's constant axes, `dtype` a name of torch."""

    path: str
    operation: str
    sizes: tuple[int, ...]
    dtype: str
    max_m: int
    min_m: int = 1
    device: str = "cuda"
    seeds: int = 2


def rows(min_m: int, max_m: int) -> list[int]:
    """The numbers of tokens to try: both ends of each bucket, up to 64."""
    bounds = [upper for upper in UPPER_BOUNDS if min_m <= upper <= max_m]
    ends = {m for upper in bounds for m in (max(min_m, lower_bound(upper)), upper)}
    return sorted({min(m, _MOST_ROWS) for m in ends or {min_m}})


def check(kernel: TritonKernel, case: Case) -> float:
    """Runs the kernel through the slot's operator; the worst share of the tolerance that it used.

    Raises:
        SelfTestFailed: a result lies outside of its tolerance, or the kernel's launch raised.
    """
    dtype = getattr(torch, case.dtype)
    name = definition_name(case.operation, case.sizes, dtype)
    used = 0.0
    for seed in range(case.seeds):
        for m in rows(case.min_m, case.max_m):
            given = reference.inputs(case.operation, case.sizes, m, dtype, case.device, seed)
            share = reference.worst(
                _run(kernel, name, case.operation, given), reference.bounds(case.operation, given)
            )
            if share > 1.0:
                raise SelfTestFailed(
                    f"{kernel.artifact[:12]} for {name} at {m} tokens uses {share:.3g} of its tolerance: at most 1"
                )
            used = max(used, share)
    return used


def check_case(case: Case) -> float:
    """Loads the kernel of a case, and checks it."""
    return check(load(Path(case.path), case.operation), case)


def in_process(case: Case, timeout_s: float = 120.0) -> float:
    """The same in another process.

    Raises:
        SelfTestFailed: also where the process died or did not end in time.
    """
    command = [sys.executable, "-m", "polymorph.engine.gpu.selftest", json.dumps(asdict(case))]
    search = os.pathsep.join(filter(None, [str(_LIBRARIES), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": search},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SelfTestFailed(f"{Path(case.path).stem[:12]} did not end within {timeout_s:.0f} s") from error
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        told = (done.stderr.strip() or "no word").splitlines()[-1]
        raise SelfTestFailed(f"{Path(case.path).stem[:12]} ended with {done.returncode}: {told}")
    return float(json.loads(lines[-1])["used"])


def _run(kernel: TritonKernel, name: str, operation: str, given: tuple[Any, ...]) -> Any:
    slots = SlotTable(Counters(given[0].device))
    entry = Entry(kernel, 0)
    slots.engage(Table(rows={name: (entry,) * len(UPPER_BOUNDS)}))
    with ops.serving(slots) as namespace, slots.counters.tallying() as tally:
        result = getattr(namespace, operation)(*given)
    if not tally[0]:
        raise SelfTestFailed(
            f"{kernel.artifact[:12]} was not called for {name}: arguments that a slot passes by"
        )
    return result


def main() -> int:
    """Reads a case from the command line; the last line is one JSON object."""
    document = json.loads(sys.argv[1])
    case = Case(**{**document, "sizes": tuple(document["sizes"])})
    if getattr(torch, case.dtype) not in SHORT:
        raise SelfTestFailed(f"dtype {case.dtype} has no slot")
    used = check_case(case)
    sys.stdout.write(json.dumps({"used": used}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
