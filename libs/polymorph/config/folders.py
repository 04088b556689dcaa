"""Folders outside of a deployment's data: what may be lost and is then made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where built libraries and compiled graphs are kept: `POLYMORPH_CACHE`, else `polymorph` under `XDG_CACHE_HOME`
    or ~/.cache.
    """
    named = os.environ.get("POLYMORPH_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "polymorph"
