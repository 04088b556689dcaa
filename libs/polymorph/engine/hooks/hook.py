"""One place in vLLM where a slot is put."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polymorph.engine.slots import Slots


class HookMissing(RuntimeError):
    """This vLLM has not what a hook was written for. The slot stays off, and nothing else changes."""


@dataclass(frozen=True)
class Hook:
    """`probe` raises HookMissing where vLLM is not as expected, and changes nothing; `install` then puts the slot in.

    `fuses` tells that Inductor would fuse the operation with its neighbours: a slot costs that fusion, also when it is
    empty, so an engine gets it only where a kernel is to be engaged.
    """

    name: str
    probe: Callable[[], None]
    install: Callable[[Slots], None]
    fuses: bool

    def hindrance(self) -> str | None:
        """Why this vLLM cannot have the slot; None where it can."""
        return hindrance(self.probe)


def hindrance(probe: Callable[[], None]) -> str | None:
    """What a probe found missing; a probe that trips over what it looks at has found it too."""
    try:
        probe()
    except HookMissing as missing:
        return str(missing)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def expect(found: Any, attribute: str) -> Any:
    """The attribute of a module or class of vLLM.

    Raises:
        HookMissing: it is not there.
    """
    try:
        return getattr(found, attribute)
    except AttributeError as error:
        raise HookMissing(f"{_named(found)} has no {attribute}") from error


def expect_parameters(function: Any, *names: str) -> None:
    """Checks the first parameters of a function by name.

    Raises:
        HookMissing: they are others.
    """
    found = tuple(inspect.signature(function).parameters)[: len(names)]
    if found != names:
        raise HookMissing(f"{_named(function)} takes {', '.join(found)}, not {', '.join(names)}")


def expect_names(function: Any, *names: str) -> None:
    """Checks that a function's code reads, writes or calls what these names tell.

    Raises:
        HookMissing: one of them does not occur.
    """
    missing = set(names) - set(function.__code__.co_names)
    if missing:
        raise HookMissing(f"{_named(function)} has no {', '.join(sorted(missing))} in its code")


def expect_operator(schema_name: str, *arguments: str) -> None:
    """Checks that vLLM's library holds an operator, for example `_C::rms_norm`, and takes `arguments` where they are told.

    Raises:
        HookMissing: it does not.
    """
    import torch  # noqa: PLC0415 - only an engine process has it

    space, _, name = schema_name.partition("::")
    if not hasattr(getattr(torch.ops, space), name):
        raise HookMissing(f"no operator {schema_name} is registered")
    found = tuple(each.name for each in getattr(getattr(torch.ops, space), name).default._schema.arguments)  # noqa: SLF001
    if arguments and found != arguments:
        raise HookMissing(f"{schema_name} takes {', '.join(found)}, not {', '.join(arguments)}")


def _named(found: Any) -> str:
    return str(getattr(found, "__qualname__", None) or getattr(found, "__name__", None) or found)
