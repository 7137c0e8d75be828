"""YAML files that people write, read strictly: every mistake is named with its line and column.

One document of YAML 1.2. Tags, duplicate keys, unknown keys and keys without a value are errors: a limit whose value is
missing must not be taken for no limit. Aliases and merge keys (``<<``) are resolved, up to a bound; models of pydantic
check the rest.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.scanner import Scanner, ScannerError

__all__ = ["Document", "InvalidYaml", "parse", "scalar", "validate"]

Path = tuple[str | int, ...]
"""Keys and indices from the root of a document to a value."""
_Model = TypeVar("_Model", bound=BaseModel)
_TAG = "tag:yaml.org,2002:"
_PLAIN = {"str", "int", "float", "bool", "null", "timestamp", "map", "seq", "value", "merge"}
"""Tags of values without a tag of their own."""
_MAX_ALIASED = 10_000
"""Values that the aliases of a file may repeat, all together; a few aliases of aliases could repeat billions."""
_MAX_DEPTH = 100
"""Levels of a file; files that people write have about ten."""
_NEAR = 0.5
"""Similarity, 0 to 1, from which on a valid word is suggested instead of an invalid one."""
_NEAR_ELSEWHERE = 0.8
"""The same for a key of another part of the file."""
_MAX_SUGGESTIONS = 20
"""Mistakes of a file for which it is said what may be meant: to look for it takes a millisecond each."""
_MAX_MISTAKES = 100
"""Mistakes of a file that are told; the others are counted."""

_NO_VALUE = "give one, or remove the key; `null` states that there is none"
_GONE = object()


class InvalidYaml(ValueError):
    """A file is not valid; the text has a line for each mistake."""


@dataclass(frozen=True, order=True)
class Position:
    """A position in a file; line and column begin at 1."""

    line: int
    column: int


@dataclass
class Document:
    """A parsed file, with the positions of its keys and values."""

    source: str
    """Name of the file in errors."""
    value: Any = None
    """Mappings, lists, text, numbers, booleans and None."""
    values: dict[Path, Position] = field(default_factory=dict)
    """Position of the value at each path."""
    keys: dict[Path, Position] = field(default_factory=dict)
    """Position of the key at each path."""
    empty: set[Path] = field(default_factory=set)
    """Paths at which nothing is written, not even `null`."""

    def error(self, path: Path, text: str) -> str:
        """Return the line for a mistake in the value at a path, or in what is nearest above it."""
        return self._line(self._position(path, ""), text)

    def error_at_key(self, path: Path, text: str) -> str:
        """Return the line for a mistake in the key at a path."""
        return self._line(self.keys.get(path), text)

    def line(self, path: Path) -> int:
        """Return the line of the key at a path. Raises ``KeyError``."""
        return self.keys[path].line

    def move(self, old: Path, new: Path) -> None:
        """Note that the value at a path, with all below it, is at another path from now on."""
        for positions in (self.values, self.keys):
            for path in [path for path in positions if path[: len(old)] == old]:
                positions[(*new, *path[len(old) :])] = positions.pop(path)
        self.empty = {(*new, *path[len(old) :]) if path[: len(old)] == old else path for path in self.empty}

    def _line(self, position: Position | None, text: str) -> str:
        return f"{self.source}:{position.line}:{position.column}: {text}" if position else f"{self.source}: {text}"

    def _position(self, path: Path, kind: str) -> Position | None:
        """Return where a mistake is; ``kind`` is pydantic's type of the error."""
        if kind == "extra_forbidden" and path in self.keys:
            return self.keys[path]
        for end in range(len(path), -1, -1):
            if path[:end] in self.values:
                known = self.keys if kind == "missing" and path[:end] in self.keys else self.values
                return known[path[:end]]
        return None


_TEXTS = {"but found another document": "a second document begins here; the file must hold one"}
"""What the parser's texts of half a sentence say."""


def parse(text: str, source: str) -> Document:
    """Parse one document; ``source`` is its name in errors. An empty one has the value None.

    Raises `InvalidYaml`.
    """
    document = Document(source)
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 2)
    yaml.Scanner = _Scanner
    try:
        root = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = Position(mark.line + 1, mark.column + 1) if mark else None
        text = _TEXTS.get(error.problem, error.problem) or "invalid YAML"
        raise InvalidYaml(document._line(position, text)) from None
    except YAMLError as error:
        raise InvalidYaml(document._line(None, str(error).splitlines()[0])) from None
    except RecursionError:
        raise InvalidYaml(document._line(None, "too many levels")) from None
    if root is not None:
        reader = _Reader(document)
        document.value = reader.read(root, ())
        if reader.problems:
            told = [document._line(position, text) for position, text in reader.problems[:_MAX_MISTAKES]]
            raise InvalidYaml(_lines(told, len(reader.problems)))
    return document


def scalar(text: str) -> Any:
    """Parse `text` as a YAML value, as in `--set key=text`; invalid YAML is returned as a string.

    Lists and mappings such as ``[a, b]`` and ``{a: 1}`` are supported, too.
    """
    try:
        return parse(text, "").value
    except InvalidYaml:
        return text


def validate(model: type[_Model], document: Document, origins: Mapping[Path, str] | None = None) -> _Model:
    """Return the document as a model; ``origins`` tells by path where values that are not in the file come from.

    Raises `InvalidYaml` with the mistakes, in the order of the file.
    """
    if not isinstance(document.value, dict):
        raise InvalidYaml(document._line(Position(1, 1), "the file must be a mapping"))
    try:
        valid = model.model_validate(document.value)
    except ValidationError as error:
        raise InvalidYaml(explain(error, model, document, origins or {})) from None
    if left := _without_value(model, document):
        told = [document.error_at_key(path, f"`{_dotted(path)}` has no value: {_NO_VALUE}") for path in left]
        raise InvalidYaml(_lines(told[:_MAX_MISTAKES], len(told)))
    return valid


def _without_value(model: type[BaseModel], document: Document) -> list[Path]:
    """Return the keys of a model after which nothing is written, in the order of the file.

    Keys that the file chooses itself, such as those of `task.config`, may be so.
    """
    found = []
    for path in document.empty & document.keys.keys():
        above = [each for schema in _at(model, path[:-1]) for each in _variants(schema)]
        of_model = any(isinstance(each, type) and issubclass(each, BaseModel) for each in above)
        if of_model and _value_at(document.value, path) is None:
            found.append(path)
    return sorted(found, key=document.keys.__getitem__)


def _value_at(value: Any, path: Path) -> Any:
    """Return what is at a path by now: defaults and overrides may have been filled in."""
    for part in path:
        there = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
        if not there:
            return _GONE
        value = value[part]
    return value


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def explain(error: ValidationError, model: type[BaseModel], document: Document, origins: Mapping[Path, str]) -> str:
    """Return a line for each mistake of a document: those of the file in its order, then those of ``origins``.

    Of very many it tells some, and how many more there are.
    """
    mistakes = []
    for number, found in enumerate(error.errors(include_url=False)[:_MAX_MISTAKES]):
        path = _in_document(found["loc"], document, found["type"])
        keys, above = _keys(_at(model, found["loc"])), _keys(_at(model, found["loc"][:-1]))
        text = _sentence(path, keys, above, _places(model), found, suggests=number < _MAX_SUGGESTIONS)
        if path in origins:
            mistakes.append((Position(1 << 62, 0), f"{origins[path]}: {text}"))
        else:
            position = document._position(path, found["type"])
            mistakes.append((position or Position(0, 0), document._line(position, text)))
    told = [line for _, line in sorted(mistakes, key=lambda mistake: mistake[0])]
    return _lines(told, error.error_count())


def _lines(told: list[str], mistakes: int) -> str:
    return "\n".join([*told, f"and {mistakes - len(told):,} more"] if mistakes > len(told) else told)


class _Scanner(Scanner):
    """Refuses lists in lists beyond the limit of levels: the time of the library's scanner grows with their square."""

    def fetch_flow_collection_start(self, TokenClass: Any, to_push: str) -> None:  # names of the library
        if len(self.flow_context) >= _MAX_DEPTH:
            raise ScannerError(None, None, f"more than {_MAX_DEPTH} levels", self.reader.get_mark())
        super().fetch_flow_collection_start(TokenClass, to_push=to_push)


class _Reader:
    """Turns nodes into values, and collects positions and problems."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._seen: set[int] = set()
        """Nodes that were read; one that is met again is an alias."""
        self._open: set[int] = set()
        """Nodes that are being read; an alias to one of them would never end."""
        self._aliased = 0
        self.problems: list[tuple[Position, str]] = []

    def read(self, node: Node, path: Path) -> Any:
        position = _position_of(node)
        self._document.values[path] = position
        if not self._may_read(node, path, position):
            return None
        tag = str(node.tag or "")
        kind = tag.removeprefix(_TAG)
        if not tag.startswith(_TAG) or kind not in _PLAIN:
            self._refuse(position, f"tags are not supported: {tag}")
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(node, kind, position, path)
        self._open.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, path)
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _may_read(self, node: Node, path: Path, position: Position) -> bool:
        self._aliased += id(node) in self._seen
        self._seen.add(id(node))
        if id(node) in self._open:
            self._refuse(position, "an alias (`*name`) stands in the value that it repeats")
        elif self._aliased > _MAX_ALIASED:
            if self._aliased == _MAX_ALIASED + 1:
                self._refuse(position, f"aliases repeat more than {_MAX_ALIASED:,} values")
        elif len(path) > _MAX_DEPTH:
            self._refuse(position, f"more than {_MAX_DEPTH} levels")
        else:
            return True
        return False

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        merged: list[Node] = []
        for key_node, value_node in node.value:
            position = _position_of(key_node)
            if not isinstance(key_node, ScalarNode):
                self._refuse(position, "a key must be a scalar")
                continue
            if key_node.tag == f"{_TAG}merge":
                merged += value_node.value if isinstance(value_node, SequenceNode) else [value_node]
                continue
            key = str(key_node.value)
            if key in mapping:
                first = self._document.keys[(*path, key)]
                self._refuse(position, f"duplicate key `{key}`; first used in line {first.line}")
                continue
            self._document.keys[(*path, key)] = position
            mapping[key] = self.read(value_node, (*path, key))
        for other in merged:
            self._merge(other, path, mapping)
        return mapping

    def _merge(self, node: Node, path: Path, into: dict[str, Any]) -> None:
        """Add the keys of a mapping that are not there yet."""
        if not isinstance(node, MappingNode):
            self._refuse(_position_of(node), "`<<` must be a mapping or a list of mappings")
            return
        whole = MappingNode(node.tag, [pair for pair in node.value if pair[0].value not in into], node.start_mark)
        position = self._document.values[path]
        if self._may_read(node, path, _position_of(node)):
            self._open.add(id(node))
            into |= self._mapping(whole, path)
            self._open.discard(id(node))
        self._document.values[path] = position

    def _scalar(self, node: ScalarNode, kind: str, position: Position, path: Path) -> Any:
        text = str(node.value)
        try:
            if kind == "null":
                if not text:
                    self._document.empty.add(path)
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
        self.problems.append((position, text))


def _position_of(node: Node) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


def _in_document(location: Path, document: Document, kind: str) -> Path:
    """Return a path of pydantic without the names of variants, which are not in the file."""
    path: Path = ()
    value = document.value
    for place, part in enumerate(location):
        there = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if there:
            value = value[part]
        if there or value is None or (kind == "missing" and place == len(location) - 1):
            path = (*path, part)
    return path


def _sentence(
    path: Path,
    keys: list[str],
    keys_above: list[str],
    places: Iterable[tuple[str, str]],
    found: Any,
    *,
    suggests: bool,
) -> str:
    """Return the sentence for an error of pydantic.

    Args:
        keys: that the value may have.
        keys_above: that the value above it may have.
        places: names and paths of all keys of the file.
        suggests: whether to say what may be meant.
    """
    dotted = _dotted(path)
    if found["type"] == "extra_forbidden":
        text = f"unknown key `{path[-1]}` in {_dotted(path[:-1]) or 'the file'}"
        if not suggests:
            return text
        meant = _meant(str(path[-1]), keys_above, places)
        return f"{text}; did you mean {meant}?" if meant else f"{text}; valid keys: {', '.join(keys_above)}"
    if found["type"] == "missing":
        return f"`{dotted}` is required"
    if found["type"] == "literal_error":
        expected = found["ctx"]["expected"]
        words = [word.strip("' ") for word in expected.replace(" or ", ",").split(",")] if suggests else []
        near = _near(found["input"], words)
        return f"`{dotted}` must be {expected}, not {found['input']!r}" + (f"; did you mean {near}?" if near else "")
    if found["type"] == "string_pattern_mismatch" and found["ctx"]["pattern"].startswith("^[a-z"):
        return f"`{dotted}` must be a DNS label (lower-case letters, digits, hyphens), not {found['input']!r}"
    if found["type"] == "string_type" and isinstance(found["input"], int | float):
        kind = "boolean" if isinstance(found["input"], bool) else "number"
        return f"`{dotted}` must be a string, but {found['input']!r} is a {kind}: put it in quotes"
    if found["type"] in ("model_type", "model_attributes_type", "dict_type") and dotted:
        return f"`{dotted}` must be a mapping" + (f" with the keys {', '.join(keys)}" if keys else "")
    message = found["msg"].removeprefix("Value error, ")
    return f"`{dotted}`: {message[:1].lower()}{message[1:]}" if dotted else message


def _near(word: Any, valid: list[str]) -> str | None:
    return next(iter(_closest(str(word), valid, _NEAR)), None)


def _closest(word: str, valid: Iterable[str], cutoff: float) -> list[str]:
    """Return the most similar valid word, if there is one, in upper or lower case alike."""
    written: dict[str, str] = {}
    for each in valid:
        written.setdefault(each.lower(), each)
    return [written[near] for near in difflib.get_close_matches(word.lower(), written, n=1, cutoff=cutoff)]


def _meant(word: str, here: list[str], places: Iterable[tuple[str, str]]) -> str:
    """Return what an unknown key may stand for: a key that may be there, or a more similar one of another place."""
    near = _near(word, here)
    elsewhere: dict[str, list[str]] = {}
    for name, path in places:
        elsewhere.setdefault(name, []).append(path)
    best = _closest(word, [*here, *elsewhere], _NEAR_ELSEWHERE)
    if not best and not near and len(word) in (3, 4):
        # One letter of a short word is much of it.
        best = _closest(word, [key for key in elsewhere if len(key) == len(word)], (len(word) - 1) / len(word))
    if not best or best[0] in here:
        return f"`{near}`" if near else ""
    return " or ".join(f"`{path}`" for path in dict.fromkeys(elsewhere[best[0]]))


def _places(schema: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the dotted path of each key below a type, other than those that the file itself chooses."""
    for each in _variants(schema):
        if isinstance(each, type) and issubclass(each, BaseModel):
            for name, field in each.model_fields.items():
                path = f"{above}.{field.alias or name}".strip(".")
                yield field.alias or name, path
                yield from _places(field.annotation, path)


def _at(schema: Any, location: Path) -> list[Any]:
    """Return the types that pydantic may have at a location in a type; empty: not known."""
    found = [schema]
    for part in location:
        found = [below for each in found for below in _below(each, part)]
    return found


def _below(schema: Any, part: str | int) -> list[Any]:
    variants = list(_variants(schema))
    if len(variants) > 1 and (named := [each for each in variants if _is_called(each, part)]):
        return named
    found = []
    for each in variants:
        if isinstance(each, type) and issubclass(each, BaseModel):
            fields = each.model_fields.items()
            found += [field.annotation for name, field in fields if part in (field.alias, name)]
        elif get_origin(each) is dict:
            found.append(get_args(each)[1])
        elif get_origin(each) in (list, tuple):
            found.append(get_args(each)[0])
    return found


def _variants(schema: Any) -> Iterator[Any]:
    """Yield the types of a union, or the type itself."""
    if get_origin(schema) is Annotated:
        yield from _variants(get_args(schema)[0])
    elif get_origin(schema) in (Union, UnionType):
        for each in get_args(schema):
            yield from _variants(each)
    else:
        yield schema


def _is_called(variant: Any, name: str | int) -> bool:
    """Whether pydantic's location names a variant of a union so: by its type, or by the value that chooses it."""
    if not (isinstance(variant, type) and issubclass(variant, BaseModel)):
        return False
    chosen = [field.annotation for field in variant.model_fields.values() if get_origin(field.annotation) is Literal]
    return name == variant.__name__ or any(name in get_args(each) for each in chosen)


def _keys(schemas: list[Any]) -> list[str]:
    """Return the keys that a mapping of these types may have."""
    models = [each for schema in schemas for each in _variants(schema)]
    fields = [
        (name, field)
        for each in models
        if isinstance(each, type) and issubclass(each, BaseModel)
        for name, field in each.model_fields.items()
    ]
    return list(dict.fromkeys(str(field.alias or name) for name, field in fields))
