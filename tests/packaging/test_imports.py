"""No two modules of the product import each other, not even for types: each can be read by itself."""

from __future__ import annotations

import ast
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("geofed", "control_plane", "region_agent", "sync", "scheduler", "deploy", "proto/geofed_pb")


def test_no_module_imports_one_that_imports_it() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if "templates" not in path.parts]
    modules = {_name(path): path for path in files if "_pb2" not in path.name}
    graph = networkx.DiGraph()
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found = {f"{node.module}.{alias.name}" for alias in node.names} & set(modules) or {node.module}
            elif isinstance(node, ast.Import):
                found = {alias.name for alias in node.names}
            else:
                continue
            graph.add_edges_from((name, other) for other in found & set(modules) if other != name)
    assert not [sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1]


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part not in ("proto", "__init__"))
