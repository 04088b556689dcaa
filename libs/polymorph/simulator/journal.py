"""What was really shown and said in a run, in order: the checker's evidence."""

from dataclasses import dataclass, field

from polymorph.events.base import Event
from polymorph.events.state import DesiredState


@dataclass(slots=True)
class Journal:
    """`shown` are the desired states as key-value took them, `told` the events as the stream took them."""

    shown: list[DesiredState] = field(default_factory=list)
    told: list[Event] = field(default_factory=list)

    def pools(self) -> list[str]:
        return sorted({state.pool for state in self.shown})

    def states(self, pool: str) -> list[DesiredState]:
        """The states of `pool` in order; the same one written again counts once."""
        states: list[DesiredState] = []
        for state in self.shown:
            if state.pool == pool and (not states or states[-1] != state):
                states.append(state)
        return states
