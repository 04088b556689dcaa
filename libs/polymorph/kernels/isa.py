"""Instruction set tiers, and what names a kind of hardware: results of one kind are never used for another."""

import hashlib
import platform
import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self

CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Isa(IntEnum):
    """Tiers of enum pm_isa; on one architecture each holds those below it."""

    GENERIC = 0
    AVX2 = 10
    AVX512 = 20
    AVX512_BF16 = 30
    NEON = 100

    def runs(self, needed: "Isa") -> bool:
        """Whether a machine of this tier runs code that needs the other tier."""
        if needed is Isa.GENERIC or needed is self:
            return True
        return Isa.NEON not in (self, needed) and needed < self


NEEDED_FLAGS = {
    Isa.AVX2: frozenset({"avx2", "fma", "f16c"}),
    Isa.AVX512: frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    Isa.AVX512_BF16: frozenset({"avx512_bf16"}),
}
LANES = {Isa.GENERIC: 4, Isa.AVX2: 8, Isa.AVX512: 16, Isa.AVX512_BF16: 16, Isa.NEON: 4}
"""Floats in one vector register of a tier."""


@dataclass(frozen=True)
class Cpu:
    """One kind of processor as its operating system tells it."""

    architecture: str
    vendor: str
    family: str
    model: str
    name: str
    flags: frozenset[str]
    cores: int
    caches: tuple[str, ...] = ()

    @classmethod
    def read(cls, cpuinfo: Path = CPUINFO, caches: Path = CACHES) -> Self:
        """This machine's processor."""
        text = cpuinfo.read_text() if cpuinfo.exists() else ""
        return cls.parse(text, platform.machine(), _caches(caches))

    @classmethod
    def parse(cls, text: str, architecture: str, caches: tuple[str, ...] = ()) -> Self:
        """From the text of /proc/cpuinfo (x86 or Arm); an empty text gives a generic processor of one core."""
        first = dict(_pairs(text.strip().split("\n\n", 1)[0]))
        flags = first.get("flags") or first.get("Features") or ""
        return cls(
            architecture=architecture,
            vendor=first.get("vendor_id") or first.get("CPU implementer") or "unknown",
            family=first.get("cpu family") or first.get("CPU architecture") or "0",
            model=first.get("model") or first.get("CPU part") or "0",
            name=first.get("model name", ""),
            flags=frozenset(flags.split()),
            cores=max(1, len(re.findall(r"^processor\s*:", text, re.MULTILINE))),
            caches=caches,
        )

    @property
    def isa(self) -> Isa:
        """The highest tier whose instructions this processor has."""
        if self.architecture in ("aarch64", "arm64"):
            return Isa.NEON
        tier = Isa.GENERIC
        for candidate, needed in NEEDED_FLAGS.items():
            if not needed <= self.flags:
                break
            tier = candidate
        return tier

    @property
    def hardware_class(self) -> str:
        """A token for queues and subjects: maker, family, model, tier and cores."""
        maker = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(self.vendor, self.vendor)
        tier = self.isa.name.lower().replace("_", "-")
        token = f"{maker}-f{self.family}-m{self.model}-{tier}-c{self.cores}"
        return re.sub(r"[^A-Za-z0-9_-]", "-", token)

    @property
    def fingerprint(self) -> str:
        """The class with a digest of everything that is known: what measurements and manifests are keyed by."""
        known = (self.architecture, self.name, " ".join(sorted(self.flags)), *self.caches)
        return f"{self.hardware_class}-{hashlib.sha256('|'.join(known).encode()).hexdigest()[:12]}"


def detect_isa() -> Isa:
    return Cpu.read().isa


def hardware_class() -> str:
    return Cpu.read().hardware_class


def hardware_fingerprint() -> str:
    return Cpu.read().fingerprint


def _pairs(block: str) -> list[tuple[str, str]]:
    lines = (line.partition(":") for line in block.splitlines())
    return [(key.strip(), value.strip()) for key, colon, value in lines if colon]


def _caches(folder: Path) -> tuple[str, ...]:
    found = []
    for index in sorted(folder.glob("index*")):
        level, kind, size = ((index / part) for part in ("level", "type", "size"))
        if level.exists() and kind.exists() and size.exists():
            parts = (level.read_text(), kind.read_text(), size.read_text())
            found.append("-".join(part.strip() for part in parts))
    return tuple(found)
