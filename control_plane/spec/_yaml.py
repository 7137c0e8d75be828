"""Parse YAML 1.2 with the position of each key and value. Tags and aliases are not supported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

Path = tuple[str | int, ...]
_TAG = "tag:yaml.org,2002:"
_PLAIN = {"str", "int", "float", "bool", "null", "timestamp", "map", "seq", "value", "merge"}


@dataclass(frozen=True)
class Position:
    """A position in the file; line and column begin at 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Problem:
    """An error and its position."""

    position: Position | None
    text: str


@dataclass
class Document:
    """A parsed file, with the positions of its keys and values."""

    value: Any
    values: dict[Path, Position]
    """Position of the value at each path."""
    keys: dict[Path, Position]
    """Position of the key at each path."""
    problems: list[Problem]


def parse(text: str) -> Document:
    """Parse one document. Errors are listed in `problems`; nothing is raised."""
    document = Document(None, {}, {}, [])
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 2)
    try:
        root = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = Position(mark.line + 1, mark.column + 1) if mark else None
        document.problems.append(Problem(position, error.problem or "invalid YAML"))
        return document
    except YAMLError as error:
        document.problems.append(Problem(None, str(error).splitlines()[0]))
        return document
    if root is not None:
        document.value = _Reader(document).read(root, ())
    return document


def scalar(text: str) -> Any:
    """Parse `text` as a YAML value, as in `--set key=text`; invalid YAML is returned as a string.

    Lists and mappings such as ``[a, b]`` and ``{a: 1}`` are supported, too.
    """
    document = parse(text)
    return text if document.problems else document.value


class _Reader:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._seen: set[int] = set()

    def read(self, node: Node, path: Path) -> Any:
        position = Position(node.start_mark.line + 1, node.start_mark.column + 1)
        self._document.values[path] = position
        if id(node) in self._seen:
            self._refuse(position, "aliases (`*name`) are not supported; repeat the value")
            return None
        self._seen.add(id(node))
        tag = str(node.tag or "")
        if not tag.startswith(_TAG) or tag.removeprefix(_TAG) not in _PLAIN:
            self._refuse(position, f"tags are not supported: {tag}")
            return None
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, tag.removeprefix(_TAG), position)

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            position = Position(key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            if not isinstance(key_node, ScalarNode):
                self._refuse(position, "a key must be a scalar")
                continue
            key = str(key_node.value)
            if key in mapping:
                first = self._document.keys[(*path, key)]
                self._refuse(position, f"duplicate key `{key}`; first used in line {first.line}")
                continue
            self._document.keys[(*path, key)] = position
            mapping[key] = self.read(value_node, (*path, key))
        return mapping

    def _scalar(self, node: Node, kind: str, position: Position) -> Any:
        text = str(node.value)
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return text.lower() == "true"
            if kind == "int":
                return int(text, 0) if text.lstrip("+-")[:2].lower() in ("0x", "0o") else int(text)
            if kind == "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            self._refuse(position, f"{text!r} is not a number")
        return text

    def _refuse(self, position: Position, text: str) -> None:
        self._document.problems.append(Problem(position, text))
