"""Between the settings of a revision and the launch of an engine."""

import dataclasses
from typing import Any

from polymorph.engine.launch import EngineLaunch
from polymorph.worker.domain.change import SUPPORTED, Settings


def settings_of(launch: EngineLaunch) -> dict[str, Any]:
    """Every supported setting as `launch` has it."""
    return {name: getattr(launch, name) for name in SUPPORTED}


def launch_with(base: EngineLaunch, settings: Settings, slots: tuple[str, ...]) -> EngineLaunch:
    """`base` with other settings; its envelope grows where they need it, and never shrinks."""
    return dataclasses.replace(base, **settings, slots=slots)
