"""What can be known of a task module without running it."""

from __future__ import annotations

import ast
from pathlib import Path

from geofed_pb.errors import GeofedError

_CALLED = {"model": 1, "layers": 1, "dataset": 3, "loss": 2}
"""With how many positional arguments the functions of a task module are called."""
_REQUIRED = (("model", "layers"), ("dataset",), ("loss",))
"""What every task module defines: one of each."""


def check_task(folder: Path, module: str) -> None:
    """See that the module parses and defines `model` or `layers`, `dataset` and `loss`. Raises ``GeofedError``
    TASK_INVALID."""
    path = folder / module
    try:
        tree = ast.parse(path.read_bytes(), filename=module)
    except FileNotFoundError:
        raise GeofedError("TASK_INVALID", f"there is no task module {module} in {folder}") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise GeofedError("TASK_INVALID", f"{module}:{line}: {getattr(error, 'msg', None) or error}") from None
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    there = _bound(tree)
    missing = [names[0] for names in _REQUIRED if there.isdisjoint(names)]
    if missing and "*" not in there:
        last = max((node.end_lineno or 1 for node in tree.body), default=1)
        raise GeofedError("TASK_INVALID", f"{module}:{last}: defines no {', no '.join(missing)}")
    for name, count in _CALLED.items():
        node = defined.get(name)
        if isinstance(node, ast.FunctionDef) and not _takes(node.args, count):
            raise GeofedError(
                "TASK_INVALID",
                f"{module}:{node.lineno}: {name} is called with {count} positional argument{'s' if count > 1 else ''}",
                hint="the functions are model(config), dataset(uri, split, config), loss(model, batch)",
            )


def _bound(tree: ast.Module) -> set[str]:
    """Names that the module binds itself, also within ``if`` and ``try``; "*": others that are not known."""
    names = set()
    left: list[ast.AST] = list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        left += ast.iter_child_nodes(node)
    return names


def _takes(arguments: ast.arguments, count: int) -> bool:
    positional = len(arguments.posonlyargs) + len(arguments.args)
    enough = arguments.vararg is not None or positional >= count
    required_keyword = any(default is None for default in arguments.kw_defaults)
    return enough and positional - len(arguments.defaults) <= count and not required_keyword
