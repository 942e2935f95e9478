"""The small changes that are made to a source file, and the same file with a call before each statement.

A change keeps line numbers, so that the functions of its source can take the place of those that are imported already.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType

_SWAPS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add},
}
_OPTIMIZED = 0x1  # the flag of a function's code, which that of a class body lacks


@dataclass(frozen=True)
class Mutant:
    """One small change.

    Attributes:
        name: place and change, without line numbers
        tree: the whole file with the change
        line: of the statement that it changes; None: it runs when the module is imported
    """

    name: str
    tree: ast.Module
    line: int | None


def mutants_of(source: str) -> Iterator[Mutant]:
    """Each mutant in turn; the next one changes the same tree, so compile or unparse it before."""
    tree, seen = ast.parse(source), Counter[str]()

    def visit(parent: ast.AST, place: str, line: int | None, inside: bool) -> Iterator[Mutant]:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "exc", "type_params"):
                continue
            items = value if isinstance(value, list) else [value]
            for number, node in enumerate(items):
                if not isinstance(node, ast.AST) or _is_beside(node):
                    continue
                at = node.lineno if isinstance(node, ast.stmt) and inside else line
                for change in _changes(node):
                    name = f"{place}: {_short(node)} -> {_short(change)}"
                    seen[name] += 1
                    if isinstance(node, ast.expr | ast.stmt):
                        ast.copy_location(change, node)
                    put(parent, field, value, number, change)
                    yield Mutant(name + f" #{seen[name]}" * (seen[name] > 1), ast.fix_missing_locations(tree), at)
                    put(parent, field, value, number, node)
                within, body = place, inside
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    within = f"{place}.{node.name}".lstrip(".")
                    body = inside or isinstance(node, ast.FunctionDef)
                # Defaults of arguments run at the import.
                yield from visit(node, within, None if isinstance(node, ast.arguments) and not line else at, body)

    def put(parent: ast.AST, field: str, value: object, number: int, node: ast.AST) -> None:
        if isinstance(value, list):
            value[number] = node
        else:
            setattr(parent, field, node)

    yield from visit(tree, "", None, False)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """What a node is replaced by."""
    changed = copy.deepcopy(node)
    if isinstance(changed, ast.Compare) and type(changed.ops[0]) in _SWAPS:
        changed.ops[0] = _SWAPS[type(changed.ops[0])]()
        yield changed
    elif isinstance(changed, ast.BoolOp | ast.BinOp) and type(changed.op) in _SWAPS:
        changed.op = _SWAPS[type(changed.op)]()
        yield changed
    elif isinstance(changed, ast.UnaryOp) and isinstance(changed.op, ast.Not):
        yield changed.operand
    elif isinstance(changed, ast.Constant) and isinstance(changed.value, int):
        changed.value = not changed.value if isinstance(changed.value, bool) else changed.value + 1
        yield changed
    elif isinstance(changed, ast.If | ast.IfExp) and not isinstance(changed.test, ast.Compare | ast.UnaryOp):
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield changed
    elif isinstance(changed, ast.Raise) or (isinstance(changed, ast.Expr) and isinstance(changed.value, ast.Call)):
        yield ast.Pass()
    elif isinstance(changed, ast.Return) and not (changed.value is None or _is_none(changed.value)):
        yield ast.Return(ast.Constant(None))
    elif isinstance(changed, ast.Continue):
        yield ast.Break()
    yield from _losses(node)


def _losses(node: ast.AST) -> Iterator[ast.AST]:
    """A node without a part that decides: one of several conditions, a summand, what is collected."""
    lost = copy.deepcopy(node)
    if isinstance(lost, ast.BoolOp):
        for number in range(len(lost.values)):
            values = lost.values[:number] + lost.values[number + 1 :]
            yield values[0] if len(values) == 1 else ast.BoolOp(lost.op, values)
    elif isinstance(lost, ast.BinOp) and isinstance(lost.op, ast.Add):
        yield lost.left
    elif isinstance(lost, ast.Compare) and isinstance(lost.ops[0], ast.Eq) and _is_length(lost.left):
        lost.ops[0] = ast.GtE()
        yield lost
    elif isinstance(lost, ast.If) and not isinstance(lost.test, ast.Constant | ast.BoolOp):
        lost.test = ast.Constant(True)
        yield lost
    elif isinstance(lost, ast.SetComp | ast.ListComp | ast.DictComp | ast.GeneratorExp):
        yield _EMPTY[type(lost)]()


_EMPTY: dict[type, Callable[[], ast.AST]] = {
    ast.SetComp: lambda: ast.Call(ast.Name("set", ast.Load()), [], []),
    ast.ListComp: lambda: ast.List([], ast.Load()),
    ast.DictComp: lambda: ast.Dict([], []),
    ast.GeneratorExp: lambda: ast.Call(ast.Name("iter", ast.Load()), [ast.Tuple([], ast.Load())], []),
}


def _is_length(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_beside(node: ast.AST) -> bool:
    """Whether no test is to notice: logs, texts, annotations, and names of the module."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    text = ast.unparse(node) if isinstance(node, ast.Expr | ast.If) else ""
    return text.startswith(("logger.", "if TYPE_CHECKING")) or isinstance(
        node, ast.JoinedStr | ast.Import | ast.ImportFrom
    )


def _short(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:70]


def with_calls(source: str, function: str, number_of: Callable[[int], int]) -> ast.Module:
    """The source with the call `function(number_of(line))` before each statement of its functions."""
    tree = ast.parse(source)
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for block in _blocks(node):
            body: list[ast.stmt] = []
            for statement in block:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    body.append(statement)
                    continue
                call = ast.Expr(
                    ast.Call(ast.Name(function, ast.Load()), [ast.Constant(number_of(statement.lineno))], [])
                )
                body += [ast.copy_location(call, statement), statement]
            block[:] = body
    return ast.fix_missing_locations(tree)


def _blocks(function: ast.FunctionDef) -> list[list[ast.stmt]]:
    """The blocks of a function, without those of functions inside it."""
    blocks, ahead = [], [function.body]
    while ahead:
        block = ahead.pop()
        blocks.append(block)
        for statement in block:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                continue
            parts = [statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
            ahead += [value for part in parts for _, value in ast.iter_fields(part) if _is_block(value)]
    return blocks


def _is_block(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], ast.stmt)


def functions_of(tree: ast.Module, file: str) -> dict[tuple[str, int], list[CodeType]]:
    """The code of each function that a module or a class holds, by name and first line."""
    found: dict[tuple[str, int], list[CodeType]] = {}

    def visit(code: CodeType) -> None:
        for constant in code.co_consts:
            if not isinstance(constant, CodeType):
                continue
            if constant.co_flags & _OPTIMIZED:
                found.setdefault((constant.co_name, constant.co_firstlineno), []).append(constant)
            else:
                visit(constant)

    visit(compile(tree, file, "exec", dont_inherit=True))
    return found
