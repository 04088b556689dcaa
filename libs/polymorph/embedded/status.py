"""`polymorph status` and `polymorph down`: what runs on a data folder, and how it ends."""

import json
import os
import signal
import time
from typing import Any

from polymorph.embedded.folder import DataFolder, alive

_DOWN_S = 150.0


def status(folder: DataFolder, *, as_json: bool) -> int:
    """Prints one line a process; 0 where all are ready, 1 where some are not, 3 where nothing runs."""
    running = folder.locked()
    state = folder.read_state() if running else None
    if running and state is None:
        print(json.dumps({"running": True, "children": {}}) if as_json else _starts(folder))
        return 1
    if state is None:
        print(
            json.dumps({"running": False})
            if as_json
            else f"nothing runs on {folder.root}; start it with `polymorph up`"
        )
        return 3
    if as_json:
        print(json.dumps({"running": True, **state}))
    else:
        print(f"{state['model']} at {state['url']}/v1, mode {state['mode']}, supervisor {state['pid']}")
        for name, child in state["children"].items():
            print(_line(name, child))
    return 0 if all(child["state"] == "ready" for child in state["children"].values()) else 1


def _line(name: str, child: dict[str, Any]) -> str:
    restarts = f", {child['restarts']} restarts" if child["restarts"] else ""
    return f"  {name:<12} {child['state']:<10} {child['detail'] or child['where']}{restarts}"


def _starts(folder: DataFolder) -> str:
    return f"a start is under way on {folder.root} and has told no process yet; ask again in a moment"


def down(folder: DataFolder) -> int:
    """Asks the supervisor to drain and waits until it is gone; 0 also where nothing ran.

    Nobody is signalled but the process that holds the folder: an id in a file may be a stranger's by now.
    """
    if not folder.locked():
        print(f"nothing runs on {folder.root}")
        return 0
    state = folder.read_state()
    if state is None:
        print(_starts(folder))
        return 1
    pid = int(state["pid"])
    if not folder.held_by(pid):
        gone = "is gone" if not alive(pid) else "is not its supervisor"
        print(
            f"process {pid}, which {folder.state_file} names, {gone}; nothing was ended, ask again in a moment"
        )
        return 1
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        print(f"process {pid} is gone already")
        return 0
    deadline = time.monotonic() + _DOWN_S
    while alive(pid):
        if time.monotonic() > deadline:
            print(
                f"process {pid} still drains after {_DOWN_S:.0f} s; see {folder.logs}, or end it with kill -9 {pid}"
            )
            return 1
        time.sleep(0.1)
    print("stopped")
    return 0
