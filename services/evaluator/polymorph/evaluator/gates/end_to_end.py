"""Gate G5: the candidate in a warm engine, on decode steps of a replay, block by block against the incumbent.

Both arms run in one engine on the same running batch: blocks of a few steps alternate in random order, so that a pair
sees the same sequences at nearly the same length, and the same state of the host where both fit into one burst. Many
short pairs tell more than few long ones: what disturbs a host lasts longer than a step. Steps are timed here; the
engine only steps.
"""

import hashlib
import logging
import math
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polymorph.evaluator.adapters.engine_lane import EngineGone, EngineLane
from polymorph.evaluator.domain.captured import OwnInputs
from polymorph.evaluator.domain.outcome import Outcome, failed, inconclusive, passed
from polymorph.evaluator.domain.replay import Replay, prompts, replay
from polymorph.evaluator.domain.table import Entry, entry, widened, with_candidate
from polymorph.evaluator.domain.texts import TEXTS
from polymorph.evaluator.gates.host import Host, HostBusy
from polymorph.evaluator.gates.own_inputs import OwnEngineInputs
from polymorph.evaluator.gates.pipeline import Job, typical
from polymorph.events.values import Gate, Ratio
from polymorph.kernels.layout import layout_digest
from polymorph.kernels.schema import TraceStatus
from polymorph.stats.agreement import Agreement, agreement, no_worse
from polymorph.stats.blocks import paired_ratio
from polymorph.stats.margin import Call, judge

_log = logging.getLogger(__name__)
_GATE = Gate.G5_END_TO_END
_BLOCK_S = 0.22
_SLACK = 1.15  # what a block may take longer than its warm-up
_ATTEMPTS = 2
_WARM_STEPS = 8
_FEWEST_BLOCKS = 3
_MOST_WAITED = 0.12
_AGREEMENT_REQUESTS = 8
_AGREEMENT_TOKENS = 16
_AGREEMENT_STEPS = 64
_AGREEMENT_PROMPT = 24
_WIDEST = 0.06


@dataclass(frozen=True, slots=True)
class _Tables:
    incumbent: list[Entry]
    candidate: list[Entry]
    artifact: str


@dataclass(slots=True)
class _Timed:
    rates: dict[str, list[float]]
    served: int = 0
    discarded: int = 0


class EngineGate:
    """Replays in an engine of our own."""

    def __init__(
        self, lane: EngineLane, host: Callable[[], Host], folder: Path, *, blocks: int, margin: float
    ) -> None:
        self._lane, self._host, self._folder = lane, host, folder
        self._blocks, self._margin = blocks, margin
        self._inputs = OwnEngineInputs(lane)
        self._texts: list[list[int]] = []

    def inputs(self, job: Job, *, wait: bool) -> OwnInputs:
        return self._inputs.of(job, wait=wait)

    def replay(self, job: Job, library: bytes, max_m: int) -> Outcome:
        host = self._host()
        try:
            self._lane.start()
            return self._replay(job, library, max_m, host)
        except (EngineGone, HostBusy) as error:
            return inconclusive(_GATE, str(error), stolen_s=host.stolen_s)
        except (RuntimeError, ValueError) as error:
            return failed(_GATE, TraceStatus.RUNTIME_ERROR, f"the engine refused it: {error}")
        finally:
            host.release()
            self._clear()

    def _replay(self, job: Job, library: bytes, max_m: int, host: Host) -> Outcome:
        tables = self._tables(job, library, max_m)
        for table in (tables.incumbent, tables.candidate):
            self._prepare(table)
        shares = typical(job.workload, job.order.min_m, job.order.max_m)
        heaviest = max(shares, key=lambda m: shares[m])
        launch = self._lane.launch
        length = launch.max_model_len or 1024
        plan = replay(job.workload, heaviest, max_num_seqs=launch.max_num_seqs, max_model_len=length)
        if not plan.served:
            text = f"M = {heaviest} is beyond the {launch.max_num_seqs} sequences that this engine decodes together"
            return inconclusive(_GATE, text)
        with_itself, with_candidate_ = self._agree(tables, plan)
        timed = self._time(tables, plan, host)
        if len(timed.rates["candidate"]) < max(_FEWEST_BLOCKS, self._blocks // 2):
            busy = f"the host was too busy: {timed.discarded} pairs of blocks were disturbed"
            return inconclusive(_GATE, busy, stolen_s=host.stolen_s, bursts=host.bursts)
        rates, served = timed.rates, timed.served
        rng = np.random.default_rng(secrets.randbits(63))
        ratio = paired_ratio(rates["incumbent"], rates["candidate"], rng)
        evidence: dict[str, Any] = {
            "greedy_agreement": with_candidate_.share, "greedy_agreement_incumbent": with_itself.share,
            "first_difference": with_candidate_.first_difference,
            "first_difference_incumbent": with_itself.first_difference,
            "tokens_per_s": rates, "discarded": timed.discarded, "served_calls": served, "requests": plan.requests,
            "prompt_tokens": plan.prompt_tokens, "stolen_s": host.stolen_s, "bursts": host.bursts,
        }  # fmt: skip
        return self._judge(ratio, plan, served, (with_itself, with_candidate_), evidence)

    def _judge(
        self,
        ratio: Ratio,
        plan: Replay,
        served: int,
        agreed: tuple[Agreement, Agreement],
        evidence: dict[str, Any],
    ) -> Outcome:
        with_itself, with_candidate_ = agreed
        text = (
            f"{ratio.point:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}] tokens/s end to end with {plan.requests} "
            f"sequences; equal greedy outputs {with_candidate_.share:.0%}, the incumbent's with itself "
            f"{with_itself.share:.0%}"
        )
        if not served:
            return failed(_GATE, TraceStatus.RUNTIME_ERROR, f"the engine never called it: {text}", **evidence)
        if not no_worse(with_candidate_, with_itself):
            changed = f"changes outputs more than the incumbent's own batching does: {text}"
            return failed(_GATE, TraceStatus.INCORRECT_NUMERICAL, changed, speedup=ratio, **evidence)
        judgement = judge(ratio, margin=self._margin, widest=_WIDEST)
        if judgement is Call.BETTER:
            return passed(_GATE, text, speedup=ratio, **evidence)
        if judgement is Call.UNDECIDED:
            return inconclusive(_GATE, f"too noisy to tell: {text}", speedup=ratio, **evidence)
        return failed(_GATE, TraceStatus.PASSED, f"no gain end to end: {text}", speedup=ratio, **evidence)

    def _time(self, tables: _Tables, plan: Replay, host: Host) -> _Timed:
        """Tokens a second by block, paired by index; pairs in which the engine waited for a core do not count."""
        order = random.Random(secrets.randbits(63))  # noqa: S311
        self._lane.rpc("slots_read", True)
        left = self._begin(plan)
        step_s = self._warm_up(tables, host)
        attempts = self._blocks * _ATTEMPTS
        together = 2 * step_s <= _BLOCK_S
        in_block = int(_BLOCK_S / (2 * step_s if together else step_s))
        steps = max(1, min(in_block, (left - _WARM_STEPS) // (2 * attempts)))
        timed = _Timed({"incumbent": [], "candidate": []})
        for _ in range(attempts):
            arms = ["incumbent", "candidate"]
            order.shuffle(arms)
            if together:
                host.ensure(2 * steps * step_s * _SLACK)
            pair = {arm: self._block(tables, arm, steps, step_s, host) for arm in arms}
            host.release()
            if max(waited for _, waited in pair.values()) > _MOST_WAITED:
                timed.discarded += 1
                continue
            for arm, (seconds, _) in pair.items():
                timed.rates[arm].append(plan.requests * steps / seconds)
            if len(timed.rates["candidate"]) == self._blocks:
                break
        timed.served = _served(self._lane.rpc("slots_read"), tables.artifact)
        self._lane.ask("finish", run=False)
        return timed

    def _block(self, tables: _Tables, arm: str, steps: int, step_s: float, host: Host) -> tuple[float, float]:
        """Seconds of one block, and the share of processor time that its threads waited for."""
        self._engage(tables.incumbent if arm == "incumbent" else tables.candidate)
        host.ensure(steps * step_s * _SLACK)
        ran, waited = self._lane.waited()
        began = time.perf_counter()
        self._lane.ask("step", count=steps)
        seconds = time.perf_counter() - began
        ran_after, waited_after = self._lane.waited()
        busy = max(ran_after - ran + waited_after - waited, 1e-9)
        return seconds, (waited_after - waited) / busy

    def _begin(self, plan: Replay) -> int:
        """All sequences past their prompts, so that every further step decodes one token of each; how many steps the
        context leaves.
        """
        longest = (self._lane.launch.max_model_len or 1024) - plan.prompt_tokens - 1
        made = prompts(self._tokens(), plan.requests, plan.prompt_tokens)
        self._lane.ask("add", prompts=made, max_tokens=longest, prefix=f"t{secrets.token_hex(4)}-")
        while self._lane.ask("step", count=1)["decoding"] < plan.requests:
            longest -= 1
        return longest

    def _warm_up(self, tables: _Tables, host: Host) -> float:
        """Seconds of one step of the slower arm, with the host's cores to itself: beside serving steps take twice as
        long, and a pair that fits into one burst would be split over two.
        """
        slowest = 0.0
        for table in (tables.candidate, tables.incumbent):
            self._engage(table)
            fastest = math.inf
            for _ in range(_WARM_STEPS // 2):
                host.ensure(_BLOCK_S)
                began = time.perf_counter()
                self._lane.ask("step", count=1)
                fastest = min(fastest, time.perf_counter() - began)
                host.release()
            slowest = max(slowest, fastest)
        return slowest

    def _agree(self, tables: _Tables, plan: Replay) -> tuple[Agreement, Agreement]:
        """The incumbent with itself in another batch, and the candidate with the incumbent in the same batch."""
        group = min(plan.requests, _AGREEMENT_REQUESTS)
        other = 4 if group <= 2 else group // 2
        made = prompts(self._tokens(), _AGREEMENT_REQUESTS, _AGREEMENT_PROMPT)
        # One at a time takes a step for every token: then each says less, and all of it in bounded time.
        tokens = min(_AGREEMENT_TOKENS, _AGREEMENT_STEPS * group // _AGREEMENT_REQUESTS)
        self._engage(tables.incumbent)
        first, again = self._greedy(made, group, tokens), self._greedy(made, other, tokens)
        self._engage(tables.candidate)
        return agreement(first, again), agreement(first, self._greedy(made, group, tokens))

    def _greedy(self, made: list[list[int]], group: int, tokens: int) -> list[list[int]]:
        outputs: list[list[int]] = []
        for at in range(0, len(made), group):
            name = f"a{secrets.token_hex(4)}-"
            self._lane.ask("add", prompts=made[at : at + group], max_tokens=tokens, prefix=name)
            outputs += self._lane.ask("finish", run=True)["outputs"]
        return outputs

    def _tables(self, job: Job, library: bytes, max_m: int) -> _Tables:
        low, high = widened(job.order, max_m)
        artifact = hashlib.sha256(library).hexdigest()
        layout = layout_digest(job.solution)
        ours = entry(job.order.definition, low, high, self._keep(artifact, library), artifact, layout)
        incumbents = [
            entry(
                kernel.definition, kernel.min_m, kernel.max_m,
                self._keep(kernel.artifact, job.incumbents[kernel.artifact]), kernel.artifact,
                job.layouts.get(kernel.artifact),
            )
            for kernel in job.order.incumbent.kernels
        ]  # fmt: skip
        return _Tables(incumbents, with_candidate(incumbents, ours), artifact)

    def _keep(self, artifact: str, content: bytes) -> str:
        folder = self._folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{artifact}.so"
        if not path.exists():
            staged = path.with_suffix(".new")
            staged.write_bytes(content)
            staged.replace(path)
        return str(path)

    def _prepare(self, table: list[Entry]) -> None:
        while True:
            answer = self._lane.rpc("slots_prepare", table)
            if not answer["ok"]:
                raise ValueError(answer["reason"])
            if not answer["left"]:
                return

    def _engage(self, table: list[Entry]) -> None:
        answer = self._lane.rpc("slots_engage", table, keep_packed=True)
        if not answer["ok"]:
            raise ValueError(answer["reason"])

    def _clear(self) -> None:
        """Nothing of a candidate stays in the engine."""
        if not self._lane.warm:
            return
        try:
            self._lane.ask("finish", run=False)
            self._lane.rpc("slots_clear")
        except (EngineGone, RuntimeError) as error:
            _log.warning("the engine is started anew: %s", error)
            self._lane.stop()

    def _tokens(self) -> list[list[int]]:
        if not self._texts:
            self._texts = self._lane.ask(
                "tokenize", texts=[text for many in TEXTS.values() for text in many]
            )["tokens"]
        return self._texts


def _served(counters: dict[str, Any], artifact: str) -> int:
    """Calls that the artifact served since the counters were reset."""
    found: dict[str, Any] = counters.get("artifacts", {}).get(artifact, {})
    return int(found.get("served", {}).get("calls", 0))
