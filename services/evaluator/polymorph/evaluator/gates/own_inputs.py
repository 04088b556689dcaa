"""Inputs of an operation out of the evaluator's own engine, on bundled texts that look like the traffic."""

import contextlib
import logging
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from polymorph.evaluator.adapters.captures import read
from polymorph.evaluator.adapters.engine_lane import EngineGone, EngineLane
from polymorph.evaluator.domain.captured import TRIED, Captured, OwnInputs
from polymorph.evaluator.domain.operation import operation
from polymorph.evaluator.domain.texts import TEXTS, Likeness, likeness, written
from polymorph.evaluator.gates.pipeline import Job, typical
from polymorph.events.types import EvaluateCandidate

_log = logging.getLogger(__name__)
_KEPT = 8
_MOST_MIB = 16
_ANY_M = 1 << 30
_FAILURES = (EngineGone, RuntimeError, OSError, ValueError)
Key = tuple[str, str, int, int]


class OwnEngineInputs:
    """Makes them once for each workload, definition and range of M, of which the last few are kept."""

    def __init__(self, lane: EngineLane) -> None:
        self._lane = lane
        self._seen: dict[Key, OwnInputs] = {}
        self._tokens: dict[str, list[int]] = {}

    def of(self, job: Job, *, wait: bool) -> OwnInputs:
        """None of them where the engine cannot give any; without `wait` too while it is not warm."""
        order = job.order
        key = (order.definition, order.workload, order.min_m, order.max_m)
        if key not in self._seen and (wait or self._lane.warm):
            try:
                self._lane.start()
                made = self._made(job)
            except _FAILURES as error:
                _log.warning("nothing was captured for %s: %s", order.definition, error)
                return OwnInputs()
            self._seen = dict([*self._seen.items(), (key, made)][-_KEPT:])
        return self._seen.get(key, OwnInputs())

    def _made(self, job: Job) -> OwnInputs:
        order, launch = job.order, self._lane.launch
        shares = typical(job.workload, order.min_m, order.max_m)
        like = likeness(
            job.workload,
            max(shares, key=lambda m: shares[m]),
            max_num_seqs=launch.max_num_seqs,
            max_model_len=launch.max_model_len or 1024,
        )
        files = self._captured(order, like, order.max_m)
        if not files:  # no step was of that size: the rows of larger ones are cut
            files = self._captured(order, like, _ANY_M)
        op = operation(order.definition)
        calls = tuple(Captured(read(content, op), "own-engine") for content in files)
        return OwnInputs(order.definition, calls, files, like.about())

    def _captured(self, order: EvaluateCandidate, like: Likeness, max_m: int) -> tuple[bytes, ...]:
        every = max(1, like.output_tokens // (TRIED + 1))
        with self._disarmed(), tempfile.TemporaryDirectory() as temporary:
            answer = self._lane.rpc(
                "slots_capture",
                order.definition,
                TRIED,
                every=every,
                max_mib=_MOST_MIB,
                min_m=order.min_m,
                max_m=max_m,
            )
            if not answer["ok"]:
                raise ValueError(answer["reason"])
            name = f"i{secrets.token_hex(4)}-"
            prompts = written(like, self._tokenized())
            self._lane.ask("add", prompts=prompts, max_tokens=like.output_tokens, prefix=name)
            self._lane.ask("finish", run=True)
            found = self._lane.rpc("slots_captured", str(Path(temporary) / "captured"))
            if not found["ok"]:
                raise ValueError(found["reason"])
            return tuple(Path(call["path"]).read_bytes() for call in found["calls"])

    @contextlib.contextmanager
    def _disarmed(self) -> Iterator[None]:
        """Inside, a capture is armed and collected; where that fails, neither it nor its requests stay in the engine."""
        try:
            yield
        except BaseException:
            self._clear()
            raise

    def _clear(self) -> None:
        """An engine that is gone has nothing armed; one that does not answer is ended."""
        if not self._lane.warm:
            return
        try:
            self._lane.rpc("slots_capture_stop")
            self._lane.ask("finish", run=False)
        except _FAILURES as error:
            _log.warning("the engine is started anew: %s", error)
            self._lane.stop()

    def _tokenized(self) -> dict[str, list[int]]:
        """Each domain's texts, one after the other, as tokens."""
        if not self._tokens:
            texts = [text for many in TEXTS.values() for text in many]
            tokens = iter(self._lane.ask("tokenize", texts=texts)["tokens"])
            self._tokens = {
                domain: [token for _ in many for token in next(tokens)] for domain, many in TEXTS.items()
            }
        return self._tokens
