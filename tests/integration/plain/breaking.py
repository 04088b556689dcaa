"""Finds out what a probe relies on, by running it with recording functions, and breaks it in vLLM."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class Thing:
    """An attribute of a module or class, its parameters, or a registered operator."""

    kind: str
    holder: Any
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {getattr(self.holder, '__name__', self.holder)}.{self.name}"

    @property
    def keys(self) -> set[tuple[Any, str]]:
        """What goes with it: classes share what they inherit."""
        owners = [self.holder] if self.kind == "operator" else [id(each) for each in self._owners]
        return {(owner, self.name) for owner in owners}

    def broken(self, patch: pytest.MonkeyPatch) -> None:
        if self.kind == "operator":
            whole = getattr(torch.ops, self.holder)
            names = [each for each in dir(whole) if each != self.name and not each.startswith("__")]
            rest = {each: getattr(whole, each) for each in names}
            patch.setattr(torch.ops, self.holder, SimpleNamespace(**rest))
        elif self.kind == "parameters of":
            native = inspect.getattr_static(self.holder, self.name)
            patch.setattr(self._owner, self.name, lambda added, *rest, **named: native(*rest, **named))
        elif self.name == "__init__":
            patch.setattr(self._owner, self.name, lambda self: None)
        else:
            for owner in self._owners:
                patch.delattr(owner, self.name)

    @property
    def _owner(self) -> Any:
        return self._owners[0]

    @property
    def _owners(self) -> list[Any]:
        """Whoever holds it: an object, and the classes that it has it from."""
        line = self.holder if inspect.isclass(self.holder) else type(self.holder)
        holders = dict.fromkeys([self.holder, *line.__mro__])
        return [each for each in holders if self.name in vars(each)]


@dataclass
class Recorder:
    """Stands in for the functions of hooks/hook.py while a probe runs."""

    things: list[Thing] = field(default_factory=list)

    def of(self, probe: Callable[[], Any], patch: pytest.MonkeyPatch) -> list[Thing]:
        with patch.context() as within:
            for module in [each for each in sys.modules if each.startswith("polymorph.engine.")]:
                for function in (self.expect, self.expect_parameters, self.expect_operator):
                    if hasattr(sys.modules[module], function.__name__):
                        within.setattr(sys.modules[module], function.__name__, function)
            probe()
        return list(dict.fromkeys(self.things))

    def expect(self, found: Any, attribute: str) -> Any:
        self.things.append(Thing("attribute", found, attribute))
        return getattr(found, attribute)

    def expect_parameters(self, function: Any, *names: str) -> None:
        assert tuple(inspect.signature(function).parameters)[: len(names)] == names
        looks = [look for look in self.things if look.kind == "attribute"]
        seen = [*(look.holder for look in looks), *(getattr(look.holder, look.name) for look in looks)]
        name = function.__name__
        holder = next(each for each in reversed(seen) if getattr(each, name, None) == function)
        self.things.append(Thing("parameters of", holder, name))

    def expect_operator(self, schema_name: str, *parameters: str) -> None:
        del parameters
        space, _, name = schema_name.partition("::")
        assert hasattr(getattr(torch.ops, space), name)
        self.things.append(Thing("operator", space, name))


def relied_on(probe: Callable[[], Any], patch: pytest.MonkeyPatch) -> list[Thing]:
    return Recorder().of(probe, patch)
