"""Lists the benchmarks: `make bench`, or `python tests/bench`."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    """Each command with the first sentence of what it says of itself."""
    print("make bench NAME [ARGS='--quick --json PATH']\n")
    for path in sorted(HERE.glob("*.py")):
        tree = ast.parse(path.read_text())
        if path != Path(__file__) and _is_command(tree):
            first = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".")
            print(f"  {path.stem:<18} {first}")


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
