"""The floor under a call's time: nothing is faster than this machine's memory and arithmetic."""

from dataclasses import dataclass

# What one measurement of a peak may miss.
_SLACK = 1.5


@dataclass(frozen=True, slots=True)
class Peaks:
    """What this machine reached with all its threads: bytes read and floating-point operations a second."""

    bytes_per_s: float
    flops_per_s: float

    def best_of(self, other: "Peaks") -> "Peaks":
        return Peaks(max(self.bytes_per_s, other.bytes_per_s), max(self.flops_per_s, other.flops_per_s))


@dataclass(frozen=True, slots=True)
class Call:
    """What one call must read from memory and compute. `resident` is the share of bytes a cache may still hold."""

    bytes: float
    flops: float
    resident: float = 0.0

    def floor_s(self, peaks: Peaks) -> float:
        """No call can be faster than this."""
        memory = self.bytes * (1.0 - self.resident) / peaks.bytes_per_s
        return max(memory, self.flops / peaks.flops_per_s) / _SLACK

    def describe(self, seconds: float, peaks: Peaks) -> str:
        """How near the machine's limits a call came."""
        return (
            f"reads {self.bytes / seconds / 1e9:.1f} of {peaks.bytes_per_s / 1e9:.1f} GB/s and computes "
            f"{self.flops / seconds / 1e9:.1f} of {peaks.flops_per_s / 1e9:.1f} GFLOP/s"
        )
