"""Lists the benchmarks: `make bench`, or `python tests/bench`."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
_TIME = re.compile(r"With `--quick` it takes (.+? (?:seconds|minutes?))\.")


def main() -> None:
    """Print each command with the time of a quick run and the first sentence of its docstring."""
    print("make bench NAME [ARGS='--quick --json PATH']\n\n  NAME               with --quick")
    for name, text in commands():
        time = _TIME.search(text)
        sentence = text.split(". ")[0].rstrip(".")
        lines = textwrap.wrap(sentence, 80 - 35)
        print(f"  {name:<18} {time[1] if time else 'not timed':<14}", ("\n" + " " * 36).join(lines))


def commands() -> Iterator[tuple[str, str]]:
    """Yield name and docstring, on one line, of each benchmark."""
    for path in sorted(HERE.glob("*.py")):
        tree = ast.parse(path.read_text())
        if path != Path(__file__) and _is_command(tree):
            yield path.stem, " ".join((ast.get_docstring(tree) or "").split())


def _is_command(tree: ast.Module) -> bool:
    """It takes the arguments that all benchmarks take; parts that they start in other processes take others."""
    imported = {
        name.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "report"
        for name in node.names
    }
    runs = any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)
    return runs and "options" in imported


if __name__ == "__main__":
    main()
