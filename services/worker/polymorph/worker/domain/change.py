"""Which way a change of settings goes: live, by an engine beside this one, by a restart, or not at all."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polymorph.engine.loading.admission import Refused
from polymorph.events.values import EngineSettings, Revision, SettingChange, Way

SUPPORTED = tuple(EngineSettings.model_fields)
GIB = 1 << 30
_POLICIES = ("fcfs", "priority")
_METHODS = ("none", "ngram", "draft_model")
_AT_LEAST = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "long_prefill_token_threshold": 0,
    "block_size": 1,
    "kv_gib": 1,
    "threads": 0,
    "tensor_parallel_size": 1,
    "num_speculative_tokens": 0,
}

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Running:
    """What an engine runs: every supported setting, those of them that it lets be set live, and up to where."""

    settings: Settings
    slots: tuple[str, ...]
    live: frozenset[str] = frozenset()
    envelope: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Room:
    """Memory for a second engine beside the first, in bytes; `known` is False where nobody can tell."""

    needed: int
    available: int
    known: bool = True

    @property
    def enough(self) -> bool:
        return self.known and self.needed <= self.available

    def told(self) -> str:
        if not self.known:
            return "the memory for a second engine cannot be told on this device"
        return (
            f"a second engine needs {self.needed / GIB:.1f} GiB, {self.available / GIB:.1f} GiB are available"
        )


@dataclass(frozen=True)
class Changed:
    """One setting that changes; `live` says whether it alone could change while the engine runs."""

    name: str
    now: Any
    wanted: Any
    live: bool

    def told(self) -> SettingChange:
        return SettingChange(name=self.name, now=_json(self.now), wanted=_json(self.wanted), live=self.live)


@dataclass(frozen=True)
class Plan:
    """What a change will do, said beforehand. `inverse` and `inverse_slots` take it back."""

    way: Way
    generation: int
    settings: Settings
    slots: tuple[str, ...]
    changes: tuple[Changed, ...]
    inverse: EngineSettings
    inverse_slots: tuple[str, ...] | None
    why: str
    pause: bool = False
    recapture: bool = False
    cache_reset: bool = False

    @property
    def new_engine(self) -> bool:
        return self.way in {Way.ENGINE, Way.ROLLING}

    @property
    def live(self) -> dict[str, Any]:
        """What to set in the engine that runs."""
        return {change.name: change.wanted for change in self.changes} if self.way is Way.LIVE else {}


def goal_settings(base: Settings, revision: Revision) -> dict[str, Any]:
    """Every setting as `revision` has it over the worker's own.

    Raises:
        Refused: a name that is not supported, or a value that cannot be.
    """
    unknown = sorted(revision.engine.model_extra or {}) if revision.engine else ()
    if unknown:
        raise Refused(f"{', '.join(unknown)}: no setting of a worker; supported are {', '.join(SUPPORTED)}")
    settings = settings_over(base, revision)
    _check(settings)
    return settings


def settings_over(base: Settings, revision: Revision) -> dict[str, Any]:
    """The same of a revision that served: nothing is looked at."""
    engine = revision.engine or EngineSettings()
    return {**base, **engine.model_dump(exclude_none=True, include=set(SUPPORTED))}


def plan(
    running: Running, settings: Settings, slots: tuple[str, ...], *, room: Room, generation: int
) -> Plan:
    """The way from what runs to `settings` and `slots`."""
    changes = tuple(
        Changed(name, running.settings[name], wanted, _live(running, name, wanted))
        for name, wanted in settings.items()
        if running.settings[name] != wanted
    )
    slots_change = set(slots) != set(running.slots)
    way = _way(changes, room, slots_change=slots_change)
    anew = way in {Way.ENGINE, Way.ROLLING}
    return Plan(
        way=way,
        generation=generation,
        settings=dict(settings),
        slots=slots,
        changes=changes,
        inverse=EngineSettings(**{change.name: change.now for change in changes}),
        inverse_slots=running.slots if slots_change else None,
        why=_why(way, changes, running, slots if slots_change else None, room),
        pause=way is Way.ROLLING,
        recapture=anew and not settings["enforce_eager"],
        cache_reset=anew and bool(running.settings["enable_prefix_caching"]),
    )


def _live(running: Running, name: str, wanted: Any) -> bool:
    return name in running.live and (name not in running.envelope or wanted <= running.envelope[name])


def _way(changes: tuple[Changed, ...], room: Room, *, slots_change: bool) -> Way:
    if not changes and not slots_change:
        return Way.NOTHING
    if not slots_change and all(change.live for change in changes):
        return Way.LIVE
    return Way.ENGINE if room.enough else Way.ROLLING


def _why(
    way: Way, changes: tuple[Changed, ...], running: Running, slots: tuple[str, ...] | None, room: Room
) -> str:
    if way is Way.NOTHING:
        return "these settings are in force"
    if way is Way.LIVE:
        return f"{_named(changes)}: within the engine's envelope, set between two steps"
    reasons = [_reason(change, running) for change in changes if not change.live]
    if slots is not None:
        reasons.append(f"slots {_listed(running.slots)} -> {_listed(slots)} are built into the graph")
    then = "it is warmed beside this one" if way is Way.ENGINE else "this one is drained and restarted"
    return f"{'; '.join(reasons)}: a new engine; {room.told()}: {then}"


def _reason(change: Changed, running: Running) -> str:
    told = f"{change.name} {_json(change.now)} -> {_json(change.wanted)}"
    if change.name in running.envelope and change.name in running.live:
        return f"{told} is above the envelope of {running.envelope[change.name]}"
    return told


def _named(changes: tuple[Changed, ...]) -> str:
    return ", ".join(f"{each.name} {_json(each.now)} -> {_json(each.wanted)}" for each in changes)


def _listed(slots: tuple[str, ...]) -> str:
    return ",".join(slots) or "none"


def _json(value: Any) -> str:
    return json.dumps(value)


def _check(settings: Settings) -> None:
    for name, low in _AT_LEAST.items():
        value = settings[name]
        if value is not None and value < low:
            raise Refused(f"{name}={value}: use {low} or more")
    for name, known in (("scheduling_policy", _POLICIES), ("speculative_method", _METHODS)):
        if settings[name] not in known:
            raise Refused(f"{name}={settings[name]!r}: use {', '.join(known)}")
    if settings["max_num_batched_tokens"] < settings["max_num_seqs"]:
        raise Refused(
            f"max_num_batched_tokens={settings['max_num_batched_tokens']}: use a token for each of the "
            f"{settings['max_num_seqs']} sequences at least"
        )
    _check_speculation(settings)


def _check_speculation(settings: Settings) -> None:
    method = settings["speculative_method"]
    if method != "none" and settings["num_speculative_tokens"] < 1:
        raise Refused(f"speculative_method={method}: name num_speculative_tokens, 1 or more")
    if method == "draft_model" and not settings["speculative_model"]:
        raise Refused("speculative_method=draft_model: name speculative_model, a folder with the draft model")
