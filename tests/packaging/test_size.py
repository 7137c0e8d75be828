"""What keeps the tree easy to read: a name of a class means one concept, functions are short, folders are small, and
constants are explained."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("geofed", "control_plane", "region_agent", "sync", "scheduler", "deploy", "proto/geofed_pb")
SHARED_NAMES = {"Metadata", "ResourceUsage", "Section"}
"""Public classes of several modules, each for one concept. Remove names, and add none: the second class of a name that
means something else gets a more specific one."""
LONGEST_FUNCTION = 50
"""Lines of a function without its docstring: about what a screen shows."""
LONG_FUNCTIONS = {"sync/ps/execution/executor.py:__init__"}
"""Functions that are longer: assignments of documented attributes. Remove names, and add none."""
MOST_FILES = 15
"""Python files of a folder, its ``__init__.py`` included."""
GENERATED = {"control_plane/store/migrations/versions", "proto/geofed_pb/v1"}
"""Folders whose files are generated: one for each revision of the store, and the wire code."""


def product_files() -> list[Path]:
    """Return the product's modules: neither templates nor what is generated from the wire's definitions."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if "templates" not in path.parts]
    return [path for path in files if "_pb2" not in path.name]


@cache
def classes_and_lengths() -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return the files of each public class name, and the lines of each function; every file is parsed once."""
    classes, lengths = defaultdict(list), {}
    for path in product_files():
        file, statements = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text()).body
        for node in statements:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(file)
        for function in functions(statements):
            name = f"{file}:{function.name}"
            lengths[name] = max(length_of(function), lengths.get(name, 0))
    return classes, lengths


def test_a_public_class_name_means_one_concept() -> None:
    classes, _ = classes_and_lengths()
    shared = {name: files for name, files in classes.items() if len(files) > 1}
    assert {name: files for name, files in shared.items() if name not in SHARED_NAMES} == {}
    assert set(shared) >= SHARED_NAMES, "no longer shared: remove it from the list"


def test_functions_are_short() -> None:
    _, lengths = classes_and_lengths()
    long = {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION}
    assert {name: length for name, length in long.items() if name not in LONG_FUNCTIONS} == {}
    assert set(long) >= LONG_FUNCTIONS, "no longer long: remove it from the list"


def test_folders_are_small() -> None:
    files = Counter(path.relative_to(ROOT).parent.as_posix() for path in product_files())
    assert {folder: n for folder, n in files.items() if n > MOST_FILES and folder not in GENERATED} == {}


def test_numeric_constants_state_their_unit_and_reason() -> None:
    assert [name for path in product_files() for name in unexplained(path)] == []


def unexplained(path: Path) -> Iterator[str]:
    """Yield the numeric constants of a module that no docstring follows."""
    statements = ast.parse(path.read_text()).body
    for node, after in pairwise([*statements, ast.Pass()]):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                numbers = [part.value for part in ast.walk(value) if isinstance(part, ast.Constant)]
            case _:
                continue
        calculated = all(
            isinstance(part, ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop)
            for part in ast.walk(value)
        )
        numeric = calculated and all(
            isinstance(number, int | float) and not isinstance(number, bool) for number in numbers
        )
        explained = (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        )
        if name.isupper() and numeric and not explained:
            yield f"{path.relative_to(ROOT).as_posix()}:{node.lineno} {name}"


def functions(statements: list[ast.AST] | list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions, those in classes and other functions included. Expressions have none and are left out."""
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from functions(getattr(node, part, []))


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    docstring = ast.get_docstring(function, clean=False)
    return lines - (docstring.count("\n") + 1 if docstring else 0)
