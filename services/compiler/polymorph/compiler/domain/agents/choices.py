"""Immutable sets of choices: as text and back, one change at a time, and recombined."""

from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, replace
from enum import IntEnum
from typing import Any, ClassVar, Protocol, TypeVar

from polymorph.kernels.isa import Isa


class Choices(Protocol):
    """A frozen dataclass of integers, booleans, words and a tier."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


C = TypeVar("C", bound=Choices)


def as_text(choices: Choices) -> dict[str, str]:
    """What solutions, results and the knowledge base hold."""
    return {field.name: _text(getattr(choices, field.name)) for field in fields(choices)}


def from_text(kind: type[C], params: Mapping[str, str]) -> C | None:
    """The choices that `params` tell; None where they are not of this kind."""
    if params.keys() != {field.name for field in fields(kind)}:
        return None
    try:
        return kind(**{field.name: _value(field.type, params[field.name]) for field in fields(kind)})
    except (KeyError, ValueError):
        return None


def changes(one: C, vocabulary: Mapping[str, tuple[Any, ...]]) -> Iterator[C]:
    """Every set that differs from `one` in exactly one choice, in the order of the vocabulary."""
    for name, values in vocabulary.items():
        for value in values:
            if value != getattr(one, name):
                yield replace(one, **{name: value})


def recombined(base: C, first: C, second: C) -> C:
    """`first` with every choice that `second` changed against `base` and `first` did not."""
    taken = {
        field.name: getattr(second, field.name)
        for field in fields(base)
        if getattr(first, field.name) == getattr(base, field.name)
    }
    return replace(first, **taken)


def _text(value: Any) -> str:
    return value.name if isinstance(value, IntEnum) else str(value).lower()


def _value(kind: Any, text: str) -> Any:
    if kind is Isa:
        return Isa[text]
    if kind is bool:
        return {"true": True, "false": False}[text]
    return kind(text)
