"""C++ templates of this folder, filled in."""

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from string import Template

from polymorph.kernels.schema import SourceFile

ELEMENT: dict[str, tuple[str, str]] = {"float32": ("float", "PM_F32"), "bfloat16": ("uint16_t", "PM_BF16")}
"""By dtype: the element's type in C++ and its code in the ABI."""


@lru_cache
def _template(name: str) -> Template:
    return Template((files(__package__) / name).read_text(encoding="utf-8"))


def rendered(name: str, values: Mapping[str, object], path: str = "kernel.cpp") -> SourceFile:
    """The template `name` with every `$placeholder` filled in, as the source `path`.

    Raises:
        KeyError: a placeholder has no value.
    """
    return SourceFile(path=path, content=_template(name).substitute(values))
