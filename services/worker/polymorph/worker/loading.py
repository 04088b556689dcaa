"""What a worker runs: kernels, as the loader read them back, and settings, as the engine did."""

from dataclasses import dataclass
from typing import Self

from polymorph.engine.loading.loader import Loaded
from polymorph.worker.changing import Receipt


@dataclass(frozen=True)
class InForce(Loaded):
    """A revision that the engine serves. Without a receipt its settings are those that it was started with."""

    receipt: Receipt | None = None
    unsettled: bool = False
    """Whether its settings are what the engine has from another revision: there are no kernels, and that is all."""

    @classmethod
    def of(cls, loaded: Loaded, receipt: Receipt | None) -> Self:
        return cls(loaded.revision, loaded.bindings, loaded.served, loaded.paused_s, receipt)
