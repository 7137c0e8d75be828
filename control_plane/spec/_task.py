"""Check a task module without running it."""

from __future__ import annotations

import ast
from pathlib import Path

from geofed_pb.errors import GeofedError
from geofed_pb.user_code.requirements import parse_requirements

_CALLED = {
    "model": 1, "layers": 1, "dataset": 3, "loss": 2, "metrics": 2, "collate": 1, "schedule": 2, "on_round": 2,
    "example_input": 1,
}  # fmt: skip
"""Number of positional arguments with which each function of a task module is called."""
_REQUIRED = (("model", "layers"), ("loss",))
"""Functions that a task module must define: one of each group. Data with a format needs no `dataset`."""
_REQUIRED_TO_EVALUATE = (("metrics", "loss"),)
"""Those of a job that trains nothing."""


def check_task(folder: Path, module: str, *, evaluates_only: bool = False) -> None:
    """Check that the module parses, and defines the functions that a job needs, with the right arguments.

    ``evaluates_only``: the job trains nothing.

    Raises ``GeofedError("TASK_INVALID")``.
    """
    path = folder / module
    try:
        tree = ast.parse(path.read_bytes(), filename=module)
    except FileNotFoundError:
        raise GeofedError("TASK_INVALID", f"task module {module} not found in {folder}") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise GeofedError("TASK_INVALID", f"{module}:{line}: {getattr(error, 'msg', None) or error}") from None
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound = _bound(tree)
    required = _REQUIRED_TO_EVALUATE if evaluates_only else _REQUIRED
    missing = [names[0] for names in required if bound.isdisjoint(names)]
    if missing and "*" not in bound:
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


def check_requirements(folder: Path, file: str) -> None:
    """Check the requirements file of a task. Raises ``GeofedError("TASK_INVALID")``."""
    try:
        content = (folder / file).read_bytes()
    except OSError as error:
        raise GeofedError(
            "TASK_INVALID", f"{file} cannot be read: {error.strerror}", hint="task.requirements"
        ) from None
    parse_requirements(content, file)


def _bound(tree: ast.Module) -> set[str]:
    """Return the names that a module binds, also within ``if`` and ``try``; "*" means unknown further names."""
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
    """Whether a function with these parameters can be called with `count` positional arguments."""
    positional = len(arguments.posonlyargs) + len(arguments.args)
    enough = arguments.vararg is not None or positional >= count
    required_keyword = any(default is None for default in arguments.kw_defaults)
    return enough and positional - len(arguments.defaults) <= count and not required_keyword
