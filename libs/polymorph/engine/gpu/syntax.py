"""What the functions of a Triton kernel's source may say: names, attributes and calls by allow-list, nothing else."""

import ast
from collections.abc import Collection
from dataclasses import dataclass, field

_TL = frozenset({
    "abs", "arange", "argmax", "argmin", "associative_scan", "assume", "atomic_add", "atomic_max",
    "atomic_min", "bfloat16", "broadcast", "broadcast_to", "cast", "cat", "cdiv", "ceil", "clamp",
    "constexpr", "cos", "cumsum", "debug_barrier", "div_rn", "dot", "dot_scaled", "erf", "exp", "exp2",
    "expand_dims", "fdiv", "flip", "float16", "float32", "float64", "float8e4nv", "float8e5", "floor",
    "fma", "full", "gather", "int1", "int16", "int32", "int64", "int8", "interleave", "join", "load", "log",
    "log2", "max", "max_contiguous", "maximum", "min", "minimum", "multiple_of", "num_programs", "permute",
    "program_id", "range", "ravel", "reduce", "reshape", "rsqrt", "sigmoid", "sin", "softmax", "split",
    "sqrt", "sqrt_rn", "static_assert", "static_range", "store", "sum", "swizzle2d", "trans", "uint16",
    "uint32", "uint64", "uint8", "umulhi", "view", "where", "xor_sum", "zeros", "zeros_like",
})  # fmt: skip
_TRITON = frozenset({"cdiv", "next_power_of_2"})
_ON_HOST = frozenset({"shape", "stride", "numel"})
_ON_DEVICE = frozenset({"dtype", "element_ty", "shape", "T", "to"})
BUILTINS = frozenset({"abs", "float", "int", "len", "max", "min", "range"})
_INFINITE = frozenset({"float('inf')", "float('-inf')"})
_LOOPS = frozenset({"range", "tl.range", "tl.static_range"})
_EXPRESSIONS = (
    ast.Attribute, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.Constant, ast.IfExp, ast.List, ast.Name,
    ast.Slice, ast.Subscript, ast.Tuple, ast.UnaryOp, ast.keyword, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
    ast.expr_context,
)  # fmt: skip


class SourceRefused(ValueError):
    """A source that is no kernel of this ABI."""


@dataclass
class Body:
    """One function, checked against what stands above it: `constants`, and the functions that it may call."""

    constants: Collection[str]
    host: Collection[str]
    device: Collection[str]
    function: ast.FunctionDef
    on_device: bool
    local: set[str] = field(default_factory=set)

    def check(self) -> None:
        arguments = self.function.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
            raise refusal(self.function, "takes other than plain parameters")
        if self.function.returns or not all(literal(default) for default in arguments.defaults):
            raise refusal(self.function, "has a default or a result that is no literal")
        for argument in arguments.args:
            if argument.annotation is not None and ast.unparse(argument.annotation) != "tl.constexpr":
                raise refusal(self.function, f"annotates {argument.arg} with other than tl.constexpr")
            self._bind(argument.arg, self.function)
        self._statements(self.function.body)

    def _bind(self, name: str, at: ast.AST) -> None:
        known = {*self.host, *self.device, *BUILTINS, "tl", "triton", self.function.name}
        if name in known or name.startswith("__"):
            raise refusal(at, f"gives {name} another meaning")
        self.local.add(name)

    def _statements(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, ast.For) and self.on_device:
                self._loop(statement)
            elif isinstance(statement, ast.If):
                self._expression(statement.test)
                self._statements([*statement.body, *statement.orelse])
            else:
                self._plain(statement)

    def _loop(self, loop: ast.For) -> None:
        if not (isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) in _LOOPS) or loop.orelse:
            raise refusal(loop, f"loops over other than {', '.join(sorted(_LOOPS))}")
        self._expression(loop.iter)
        self._target(loop.target)
        self._statements(loop.body)

    def _plain(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=[target], value=value):
                self._expression(value)
                self._target(target)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                self._expression(value)
                self._operator(op)
                self._name(name, statement)
            case ast.Return(value=value) | ast.Expr(value=value):
                if value is not None and not is_text(value):
                    self._expression(value)
            case ast.Pass():
                pass
            case _:
                raise refusal(statement, "stands in a function")

    def _target(self, target: ast.expr) -> None:
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        for name in names:
            if not isinstance(name, ast.Name):
                raise refusal(target, "is assigned to, and is no name")
            self._bind(name.id, target)

    def _expression(self, root: ast.AST) -> None:
        if not isinstance(root, _EXPRESSIONS):
            raise refusal(root, "stands in an expression")
        match root:
            case ast.Name(id=name):
                self._name(name, root)
            case ast.Attribute():
                self._attribute(root)
            case ast.Call():
                self._call(root)
            case ast.Constant(value=value):
                if not (value is None or isinstance(value, int | float)):
                    raise refusal(root, "is a constant other than a number")
            case ast.operator():
                self._operator(root)
            case _:
                for child in ast.iter_child_nodes(root):
                    self._expression(child)

    def _name(self, name: str, at: ast.AST) -> None:
        known = {*self.local, *self.constants}
        if name not in known:
            raise refusal(at, f"names {name}, which is not known here")

    def _operator(self, op: ast.AST) -> None:
        # Powers and shifts of constants are folded by Python itself, and could fill its memory.
        if isinstance(op, ast.Pow | ast.LShift | ast.MatMult):
            raise refusal(op, "is an operator that kernels do without")

    def _attribute(self, attribute: ast.Attribute) -> None:
        match attribute.value:
            case ast.Name(id="tl"):
                allowed = _TL if self.on_device else frozenset[str]()
            case ast.Name(id="triton"):
                allowed = _TRITON
            case _:
                allowed = _ON_DEVICE if self.on_device else _ON_HOST
                self._expression(attribute.value)
        if attribute.attr not in allowed:
            raise refusal(attribute, "is no attribute that kernels use")

    def _call(self, call: ast.Call) -> None:
        if ast.unparse(call) in _INFINITE:
            return
        self._callee(call)
        for argument in call.args:
            self._argument(argument)
        for keyword in call.keywords:
            if keyword.arg is None:
                raise refusal(call, "unpacks arguments")
            if not is_text(keyword.value):
                self._argument(keyword.value)

    def _callee(self, call: ast.Call) -> None:
        match call.func:
            case ast.Name(id=name):
                callable_here = self.device if self.on_device else self.host
                if name not in callable_here and name not in BUILTINS:
                    raise refusal(call, f"calls {name}, which is not known here")
            case ast.Subscript(value=ast.Name(id=name), slice=grid) if not self.on_device:
                if name not in self.device:
                    raise refusal(call, f"launches {name}, which is no @triton.jit function above")
                self._expression(grid)
            case ast.Attribute():
                self._attribute(call.func)
            case _:
                raise refusal(call, "calls other than a name")

    def _argument(self, argument: ast.expr) -> None:
        # tl.reduce and tl.associative_scan take a function of the device.
        if self.on_device and isinstance(argument, ast.Name) and argument.id in self.device:
            return
        self._expression(argument)


def literal(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return value is None or isinstance(value, int | float)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return True
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="tl"), attr="constexpr"), args=[inner], keywords=[]
        ):
            return literal(inner)
        case _:
            return False


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def refusal(node: ast.AST, why: str) -> SourceRefused:
    line = getattr(node, "lineno", "?")
    try:
        shown = ast.unparse(node).splitlines()[0][:80]
    except (RecursionError, IndexError):
        shown = type(node).__name__
    return SourceRefused(f"line {line}: `{shown}` {why}")
