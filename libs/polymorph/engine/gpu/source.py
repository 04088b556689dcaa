"""What a Triton kernel's source may hold (ABI `triton-1`): checked as a syntax tree before any of it runs.

A source imports triton and triton.language, and consists of constants, functions for the device (`@triton.jit`) and
straight host functions, among them `launch` with the parameters that its operation declares. The evaluator built and
signed it; this check is the second lock, and it needs no package.
"""

import ast
import re
from dataclasses import dataclass, field

from polymorph.engine.gpu.syntax import BUILTINS, Body, SourceRefused, is_text, literal, refusal

__all__ = ["ABI", "LAUNCH", "SourceRefused", "check", "operation_of", "sizes_of"]

ABI = "triton-1"
MAX_CHARACTERS = 1 << 16

LAUNCH: dict[str, tuple[str, ...]] = {
    "rms_norm": ("y", "x", "weight", "eps"),
    "fused_add_rms_norm": ("y", "residual_out", "x", "residual", "weight", "eps"),
    "silu_and_mul": ("y", "x"),
    "linear": ("y", "x", "weight", "bias", "scratch"),
}
"""Parameters of `launch` by operation: outputs first, which the slot allocates."""
SCRATCH = ("m", "n", "k")
"""Parameters of `scratch_floats`, which a linear kernel may define: how many float32 of scratch a call needs."""

_DEFINITIONS = {
    "linear": re.compile(r"gemm_n(\d+)_k(\d+)_(f32|bf16|f16)"),
    "rms_norm": re.compile(r"rms_norm_h(\d+)_(f32|bf16|f16)"),
    "fused_add_rms_norm": re.compile(r"fused_add_rms_norm_h(\d+)_(f32|bf16|f16)"),
    "silu_and_mul": re.compile(r"silu_and_mul_d(\d+)_(f32|bf16|f16)"),
}
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_IMPORTS = {("triton", None), ("triton.language", "tl")}


def operation_of(definition: str) -> str:
    """The operation whose slot serves a definition.

    Raises:
        SourceRefused: no slot on a GPU serves it.
    """
    return _matched(definition)[0]


def sizes_of(definition: str) -> tuple[tuple[int, ...], str]:
    """The constant axes that a definition's name tells, and its dtype as torch names it.

    Raises:
        SourceRefused: no slot on a GPU serves it.
    """
    *sizes, short = _matched(definition)[1]
    return tuple(map(int, sizes)), _DTYPES[short]


def _matched(definition: str) -> tuple[str, tuple[str, ...]]:
    for operation, pattern in _DEFINITIONS.items():
        found = pattern.fullmatch(definition)
        if found:
            return operation, found.groups()
    raise SourceRefused(f"no slot on a GPU serves {definition}: {', '.join(_DEFINITIONS)} have one")


def check(source: str, operation: str) -> None:
    """Returns where the source is a kernel for the operation.

    Raises:
        SourceRefused: it is too long, no Python, or holds what such a source may not.
    """
    if operation not in LAUNCH:
        raise SourceRefused(f"operation {operation!r} has no slot on a GPU: one of {', '.join(LAUNCH)}")
    if len(source) > MAX_CHARACTERS:
        raise SourceRefused(f"{len(source)} characters of source: at most {MAX_CHARACTERS}")
    try:
        module = _Module(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, SourceRefused):
            raise
        raise SourceRefused(f"the source is no Python that can be read: {error}") from error
    module.must_define("launch", LAUNCH[operation])
    if "scratch_floats" in module.host:
        module.must_define("scratch_floats", SCRATCH)


@dataclass
class _Module:
    tree: ast.Module
    constants: set[str] = field(default_factory=set)
    host: dict[str, ast.FunctionDef] = field(default_factory=dict)
    device: dict[str, ast.FunctionDef] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, statement in enumerate(self.tree.body):
            match statement:
                case ast.Expr(value=ast.Constant(value=str())) if index == 0:
                    pass
                case ast.Import(names=[ast.alias(name=name, asname=other)]) if (name, other) in _IMPORTS:
                    pass
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if literal(value):
                    self.constants.add(self._new(name, statement))
                case ast.FunctionDef():
                    self._add_function(statement)
                case _:
                    raise refusal(statement, "stands at the top of a kernel's source")

    def must_define(self, name: str, parameters: tuple[str, ...]) -> None:
        found = self.host.get(name)
        if found is None:
            raise SourceRefused(f"the source has no host function {name}({', '.join(parameters)})")
        if tuple(argument.arg for argument in found.args.args) != parameters:
            raise SourceRefused(f"{name} must take {', '.join(parameters)}")

    def _add_function(self, function: ast.FunctionDef) -> None:
        on_device = _on_device(function)
        self._new(function.name, function)
        Body({*self.constants}, self.host, self.device, function, on_device).check()
        # Known from here on: a function calls only those above it, so none calls itself.
        (self.device if on_device else self.host)[function.name] = function

    def _new(self, name: str, at: ast.stmt) -> str:
        taken = {*self.constants, *self.host, *self.device, *BUILTINS, "tl", "triton"}
        if name in taken or name.startswith("__"):
            raise refusal(at, f"gives {name} another meaning")
        return name


def _on_device(function: ast.FunctionDef) -> bool:
    match function.decorator_list:
        case []:
            return False
        case [ast.Attribute(value=ast.Name(id="triton"), attr="jit")]:
            return True
        case [
            ast.Call(
                func=ast.Attribute(value=ast.Name(id="triton"), attr="jit"),
                args=[],
                keywords=[ast.keyword(arg="do_not_specialize", value=ast.List(elts=names))],
            )
        ] if all(is_text(name) for name in names):
            return True
        case _:
            raise refusal(function, "is decorated with other than triton.jit")
