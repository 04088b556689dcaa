"""The bus on NATS and JetStream."""

from polymorph.bus.nats.bus import NatsBus

__all__ = ["NatsBus"]
