"""Reads ELF shared libraries (64 bits, little endian) the way the dynamic loader does."""

import struct
from collections.abc import Iterator
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

EM_X86_64 = 62
EM_AARCH64 = 183
PT_LOAD = 1
PT_DYNAMIC = 2
PT_INTERP = 3
PT_TLS = 7
PT_GNU_STACK = 0x6474E551
PF_X = 1
PF_W = 2

_ET_DYN = 3
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELA = struct.Struct("<QQq")
_ENTRY = struct.Struct("<qQ")
_MAX_SYMBOLS = 65536
_PAGE = 4096


class Dynamic(IntEnum):
    """Tags of the dynamic section."""

    NEEDED = 1
    PLTRELSZ = 2
    HASH = 4
    STRTAB = 5
    SYMTAB = 6
    RELA = 7
    RELASZ = 8
    STRSZ = 10
    INIT = 12
    FINI = 13
    RPATH = 15
    REL = 17
    TEXTREL = 22
    JMPREL = 23
    INIT_ARRAY = 25
    FINI_ARRAY = 26
    RUNPATH = 29
    PREINIT_ARRAY = 32
    RELR = 36
    DEPAUDIT = 0x6FFFFEFB
    AUDIT = 0x6FFFFEFC
    AUXILIARY = 0x7FFFFFFD
    FILTER = 0x7FFFFFFF


class MalformedElf(ValueError):
    """Bytes that are no shared library of the kind we build."""


class Segment(NamedTuple):
    type: int
    flags: int
    offset: int
    address: int
    file_size: int


class Symbol(NamedTuple):
    name: str
    type: int
    defined: bool


class Relocation(NamedTuple):
    type: int
    symbol: int


class Image:
    """A shared library's bytes, and what its dynamic section says of them."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        _, kind, self.machine, *rest = self._unpack(_HEADER, 0)
        if content[:6] != b"\x7fELF\x02\x01":
            raise MalformedElf("not a 64-bit little-endian ELF file")
        if kind != _ET_DYN:
            raise MalformedElf(f"ELF type {kind} is not a shared library ({_ET_DYN})")
        table, size, count = rest[2], rest[6], rest[7]
        if size != _SEGMENT.size:
            raise MalformedElf(f"program headers of {size} bytes: {_SEGMENT.size} expected")
        self.segments = tuple(self._segment(table + index * size) for index in range(count))
        self._refuse_overlaps()

    @cached_property
    def dynamic(self) -> dict[int, list[int]]:
        """The values of each tag of the one dynamic section."""
        found = [segment for segment in self.segments if segment.type == PT_DYNAMIC]
        if len(found) != 1:
            raise MalformedElf(f"{len(found)} dynamic sections: exactly one expected")
        values: dict[int, list[int]] = {}
        # The loader reads the section where it is mapped, which need not be where the header's offset points.
        start = self._offset(found[0].address)
        for at in range(start, start + found[0].file_size, _ENTRY.size):
            tag, value = self._unpack(_ENTRY, at)
            if tag == 0:
                return values
            values.setdefault(tag, []).append(value)
        raise MalformedElf("the dynamic section has no end")

    def executable(self) -> Iterator[bytes]:
        """What is mapped executable: the segments, with what shares their pages in the file."""
        for segment in self.segments:
            if segment.type == PT_LOAD and segment.flags & PF_X:
                end = segment.offset + segment.file_size + _PAGE - 1
                yield self._content[segment.offset & -_PAGE : end & -_PAGE]

    def needed(self) -> list[str]:
        return [self._text(value) for value in self.dynamic.get(Dynamic.NEEDED, [])]

    @cached_property
    def _symbols(self) -> tuple[Symbol, ...]:
        if Dynamic.HASH not in self.dynamic:
            raise MalformedElf("no DT_HASH: link with --hash-style=sysv")
        _, count = self._unpack(struct.Struct("<II"), self._offset(self._one(Dynamic.HASH)))
        if count > _MAX_SYMBOLS:
            raise MalformedElf(f"{count} symbols: at most {_MAX_SYMBOLS} are read")
        table = self._offset(self._one(Dynamic.SYMTAB))
        return tuple(self._symbol(table + index * _SYMBOL.size) for index in range(count))

    def symbols(self) -> tuple[Symbol, ...]:
        """The dynamic symbol table, its empty first entry included."""
        return self._symbols

    def relocations(self) -> Iterator[Relocation]:
        """All relocations with a symbol or a type; RELR holds plain relative ones only."""
        if Dynamic.REL in self.dynamic:
            raise MalformedElf("relocations without addends: not of this architecture")
        for table, size in ((Dynamic.RELA, Dynamic.RELASZ), (Dynamic.JMPREL, Dynamic.PLTRELSZ)):
            if table not in self.dynamic:
                continue
            start = self._offset(self._one(table))
            for at in range(start, start + self._one(size), _RELA.size):
                _, info, _ = self._unpack(_RELA, at)
                yield Relocation(type=info & 0xFFFFFFFF, symbol=info >> 32)

    def _refuse_overlaps(self) -> None:
        # The loader maps whole pages: where two segments share one, it would see other bytes than this reader.
        end = 0
        for segment in self.segments:
            if segment.type == PT_LOAD:
                if segment.address & -_PAGE < end:
                    raise MalformedElf(f"segment at {segment.address:#x} overlaps the one before it")
                end = (segment.address + segment.file_size + _PAGE - 1) & -_PAGE

    def _segment(self, at: int) -> Segment:
        kind, flags, offset, address, _, file_size, _, _ = self._unpack(_SEGMENT, at)
        return Segment(kind, flags, offset, address, file_size)

    def _symbol(self, at: int) -> Symbol:
        name, info, _, section, _, _ = self._unpack(_SYMBOL, at)
        return Symbol(self._text(name), info & 15, section != 0)

    def _one(self, tag: Dynamic) -> int:
        values = self.dynamic.get(tag, [])
        if len(values) != 1:
            raise MalformedElf(f"{len(values)} entries {tag.name}: exactly one expected")
        return values[0]

    def _text(self, index: int) -> str:
        start = self._offset(self._one(Dynamic.STRTAB)) + index
        end = self._content.find(b"\0", start)
        if end < 0 or index >= self._one(Dynamic.STRSZ):
            raise MalformedElf(f"string {index} lies outside the string table")
        return self._content[start:end].decode(errors="replace")

    def _offset(self, address: int) -> int:
        """The place in the file of an address in memory."""
        for segment in self.segments:
            inside = address - segment.address
            if segment.type == PT_LOAD and 0 <= inside < segment.file_size:
                return segment.offset + inside
        raise MalformedElf(f"address {address:#x} is in no loaded segment")

    def _unpack(self, layout: struct.Struct, at: int) -> tuple[int, ...]:
        if at < 0 or at + layout.size > len(self._content):
            raise MalformedElf(
                f"{layout.size} bytes at {at} lie outside the file of {len(self._content)} bytes"
            )
        return layout.unpack_from(self._content, at)
