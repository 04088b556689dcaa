"""What a kernel could keep from one call to the next: it keeps nothing."""

import struct

from polymorph.kernels.elf import PT_LOAD

MOST_BYTES = 4 << 20
"""No kernel's library is larger."""

_PT_GNU_RELRO = 0x6474E552
_MOST_STATE = 64


def state(content: bytes) -> list[str]:
    """Why the library could keep something: writable memory beyond the loader's own. `inspect_library` passed it."""
    if len(content) > MOST_BYTES:
        return [f"a library of {len(content)} bytes: at most {MOST_BYTES}"]
    table, size, count = struct.unpack_from("<Q", content, 32)[0], *struct.unpack_from("<HH", content, 54)
    writable = relro = 0
    for index in range(count):
        kind, flags, *_, memory, _ = struct.unpack_from("<IIQQQQQQ", content, table + index * size)
        writable += memory if kind == PT_LOAD and flags & 2 else 0
        relro += memory if kind == _PT_GNU_RELRO else 0
    if writable - relro > _MOST_STATE:
        return [f"{writable - relro} bytes of writable data: a kernel keeps no state between calls"]
    return []
