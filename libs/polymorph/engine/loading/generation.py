"""The generation that was seen last, on disk."""

from pathlib import Path

from polymorph.bus.errors import Retryable


class GenerationFile:
    """The newest generation that was seen, kept over restarts: what was refused as old stays refused."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int:
        try:
            return int(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return -1

    def write(self, generation: int) -> None:
        """Raises Retryable where the disk does not take it."""
        if generation == self.read():
            return
        staged = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            staged.write_text(str(generation))
            staged.replace(self._path)
        except OSError as error:
            raise Retryable(f"generation {generation} cannot be kept in {self._path}: {error}") from error
