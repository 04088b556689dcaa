"""C++ templates, and what makes two sources the same."""

import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from string import Template

from polymorph.kernels.schema import Solution, SourceFile

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@lru_cache
def _template(name: str) -> Template:
    return Template((files(f"{__package__}.patterns") / name).read_text(encoding="utf-8"))


def render(name: str, path: str, values: Mapping[str, object]) -> SourceFile:
    """The template `name` with every `$placeholder` filled in.

    Raises:
        KeyError: a placeholder has no value.
    """
    return SourceFile(path=path, content=_template(name).substitute(values))


def normalised_digest(solution: Solution) -> str:
    """Equal for solutions whose sources differ in comments, spaces and file order only."""
    parts = [solution.x_polymorph.isa]
    for source in sorted(solution.sources, key=lambda source: source.path):
        code = " ".join(_COMMENT.sub(" ", source.content).split())
        parts.append(f"{source.path}\n{code}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
