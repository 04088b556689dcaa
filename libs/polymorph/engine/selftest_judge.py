"""Judges a kernel by what it wrote into memory that it shares with this process, which holds the references."""

from pathlib import Path
from typing import Any

import torch

from polymorph.engine.selftest_case import SelfTest, SelfTestResult
from polymorph.engine.selftest_inputs import Unfit, read, samples
from polymorph.engine.selftest_memory import Memory, Trial
from polymorph.engine.selftest_reference import decided, error_of, reference
from polymorph.engine.selftest_runner import KernelFailed, Place, Runner
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.host.pool import KernelHost
from polymorph.kernels.schema import Definition

# By class of numerics: how many times the native error (root mean square against float64) a kernel may have.
_MARGIN = {"bitwise": 1.0, "reordered": 4.0, "lossy": 2e4}


class Wrong(Exception):
    """An output that is not what the definition says."""

    def __init__(self, reason: str, error: float = 0.0, native_error: float = 0.0) -> None:
        super().__init__(reason)
        self.error, self.native_error = error, native_error


def judge(test: SelfTest) -> SelfTestResult:
    """Every trial; the first that fails ends it."""
    torch.set_num_threads(1)
    definition = definition_named(test.definition)
    try:
        found = samples(definition, read(test.calls, test.weight), test.rows)
        memory = Memory(definition)
        trials = [trial for sample in found for trial in memory.trials(sample)]
    except Unfit as error:
        return SelfTestResult(ok=False, reason=str(error))
    with KernelHost(Path(test.host)).context(1) as context:
        calls = tuple(trial.call for trial in trials)
        place = Place(test.library, context, test.level, tuple(memory.read), tuple(memory.written), calls)
        return _tried(test, definition, place, trials)


def _tried(test: SelfTest, definition: Definition, place: Place, trials: list[Trial]) -> SelfTestResult:
    worst, label = SelfTestResult(ok=True, reason=""), "at load"
    runner = None
    try:
        runner = Runner(place)
        runner.load()
        for index, trial in enumerate(trials):
            label = f"at {trial.label}"
            runner.run(index)
            result = _judged(definition, trial, _MARGIN[test.numerics], test.numerics)
            worst = max(worst, result, key=lambda each: each.error)
    except KernelFailed as failure:
        return SelfTestResult(ok=False, reason=f"{test.definition} {label}: {failure}")
    except Wrong as wrong:
        reason = f"{test.definition} {label}: {wrong}"
        return SelfTestResult(ok=False, reason=reason, error=wrong.error, native_error=wrong.native_error)
    finally:
        if runner is not None:
            runner.close()
    return worst


def _judged(definition: Definition, trial: Trial, margin: float, numerics: str) -> SelfTestResult:
    if not all(region.intact() for region in trial.written):
        raise Wrong("the kernel wrote beside an output")
    exact = reference(definition, trial.inputs, torch.float64)
    worst = SelfTestResult(ok=True, reason="")
    for name, output in trial.outputs.items():
        native, truth = trial.native[name], exact[name]
        if not output.is_floating_point():
            _raise_for_other_integers(name, output, native, truth)
            continue
        error = error_of(output, decided(output, truth, native))
        native_error = error_of(native, decided(native, truth, native))
        # A sum of one order may by luck be exact: never ask for less than one rounding of the output's dtype.
        bound = margin * max(native_error, torch.finfo(output.dtype).eps)
        if not error <= bound:
            text = (
                f"error {error:.3g} of {name} against float64; {bound:.3g} is allowed for {numerics} numerics"
            )
            raise Wrong(text, error, native_error)
        worst = max(worst, SelfTestResult(True, "", error, native_error), key=lambda each: each.error)
    return worst


def _raise_for_other_integers(name: str, output: Any, native: Any, truth: Any) -> None:
    """Integers are right where they are those of either reference: which of two near ones is first may differ."""
    wrong = int(((output != native) & (output != truth)).sum())
    if wrong:
        raise Wrong(f"{wrong} of {output.numel()} integers of {name} are others than the definition gives")
