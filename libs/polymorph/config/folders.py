"""Folders outside of a deployment's data folder."""

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


def state_folder() -> Path:
    """Where a server without a data folder remembers what must outlive it: `POLYMORPH_STATE`, else `polymorph` under
    `XDG_STATE_HOME` or ~/.local/state.
    """
    named = os.environ.get("POLYMORPH_STATE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "polymorph"
