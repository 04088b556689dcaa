"""`polymorph status` and `polymorph down`: what runs on a data folder, and how it ends."""

import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from polymorph.embedded.folder import DataFolder, alive

if TYPE_CHECKING:
    from polymorph.embedded.mode import New
    from polymorph.events.state import Mode

_DOWN_S = 200.0  # a little more than all that a supervisor gives its processes, one rank after the other
_POLL_S = 0.1


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
            else f"nothing runs on {folder.root.absolute()}; start it with `polymorph up{folder.option}`"
        )
        return 3
    from polymorph.embedded.mode import told  # noqa: PLC0415 - keeps down and doctor quick

    mode = _mode(folder, state)
    if as_json:
        print(json.dumps({"running": True, **state, "mode": None if mode == "new" else mode}))
    else:
        known = told(mode, given=state["mode"], tune=state.get("tune", True))
        print(f"{state['model']} at {state['url']}/v1, {known}, supervisor {state['pid']}")
        for name, child in state["children"].items():
            print(_line(name, child))
    return 0 if all(child["state"] == "ready" for child in state["children"].values()) else 1


def _mode(folder: DataFolder, state: dict[str, Any]) -> "Mode | New | None":
    """As the pool has it now, not as the start was asked for."""
    from polymorph.embedded.mode import mode_of  # noqa: PLC0415 - as above

    if state["children"].get("nats", {}).get("state") != "ready":
        return None
    return mode_of(folder, state["nats"], state["pool"])


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
        print(f"nothing runs on {folder.root.absolute()}")
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
    return _until_gone(folder, pid)


def _until_gone(folder: DataFolder, pid: int) -> int:
    """Waits for the supervisor's end and passes on what it says it waits for."""
    deadline, said = time.monotonic() + _DOWN_S, ""
    while alive(pid):
        if time.monotonic() > deadline:
            print(
                f"process {pid} still drains after {_DOWN_S:.0f} s; see {folder.logs}, or end it with kill -9 {pid}"
            )
            return 1
        drains = (folder.read_state() or {}).get("drains", "")
        if drains and drains != said:
            said = drains
            print(drains, flush=True)
        time.sleep(_POLL_S)
    print("stopped")
    return 0
