"""Finished evaluations on disk: a job that is delivered again gets the answer it got before."""

import logging
import os
from pathlib import Path

from pydantic import ValidationError

from polymorph.events.subjects import is_token
from polymorph.events.types import CandidateEvaluated

_log = logging.getLogger(__name__)
_KEPT = 5000


class Records:
    """One file for each evaluation, written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def find(self, evaluation_id: str) -> CandidateEvaluated | None:
        """None too for a record that cannot be read: that evaluation is made anew."""
        path = self._path(evaluation_id)
        if path is None or not path.exists():
            return None
        try:
            return CandidateEvaluated.model_validate_json(path.read_bytes())
        except ValidationError as error:
            _log.warning("the record %s cannot be read: %s", path, str(error).splitlines()[0])
            return None

    def keep(self, event: CandidateEvaluated) -> None:
        path = self._path(event.evaluation_id)
        if path is None:
            return
        staged = path.with_suffix(f".{os.getpid()}")
        staged.write_text(event.model_dump_json())
        staged.replace(path)
        self._prune()

    def _path(self, evaluation_id: str) -> Path | None:
        return self._folder / f"{evaluation_id}.json" if is_token(evaluation_id) else None

    def _prune(self) -> None:
        files = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in files[:-_KEPT]:
            path.unlink(missing_ok=True)
