"""Write the references of the job file, of the region file, of the chart's values and of who may call what:
`python -m deploy.reference [FOLDER]`.

The pages are derived from the files' JSON Schemas and from the rules of the RPCs alone, so that each key and each rule
is described in one place.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.service import AGENT_RULES, CONTROL_RULES
from control_plane.spec import json_schema as job_schema
from geofed_pb.security.access import Rule
from region_agent.config import json_schema as region_schema
from sync.file_transfer.access import EXCHANGE_RULES
from sync.ps.server import WORKER_RULES

DOCS = Path(__file__).resolve().parents[1] / "docs"
_CHART_SCHEMA = Path(__file__).resolve().parent / "helm" / "geofed" / "values.schema.json"
_HEAD = """\
# Keys of the {file} file

<!-- Written by `make docs` from the schema; a change belongs into the docstrings of {source}. -->

`{command}` prints the same as a JSON Schema; [{page}]({page}) has an example.

- A required key must be given if its section is. `–`: no default, or the one that the meaning states.
- NAME is a name that the file chooses; `[]` is each item of a list.
"""
_CHART_HEAD = """\
# Values of the chart

<!-- Written by `make docs` from deploy/helm/geofed/values.schema.json. -->

[helm.md](helm.md) has an example. `–`: empty, or no default.
"""
_TABLE = "| key | value | default | meaning |\n| --- | --- | --- | --- |"
_LARGE = 1 << 31
"""Limits from here on are written as powers of two."""

Schema = dict[str, Any]


@dataclass(frozen=True)
class _Key:
    """A row of the reference."""

    path: str
    value: str
    default: str
    meaning: str

    def row(self) -> str:
        cells = (f"`{self.path}`", self.value, self.default, self.meaning)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def job_reference() -> str:
    """Return the page about the keys of the job file."""
    head = _HEAD.format(file="job", page="job-file.md", command="geofed schema", source="control_plane/spec/sections")
    return Reference(job_schema()).page(head)


def region_reference() -> str:
    """Return the page about the keys of the region file."""
    head = _HEAD.format(
        file="region", page="region-file.md", command="geofed agent schema", source="region_agent/config"
    )
    return Reference(region_schema()).page(head)


def chart_reference() -> str:
    """Return the page about the values of the Helm chart."""
    return Reference(json.loads(_CHART_SCHEMA.read_text(encoding="utf-8"))).page(_CHART_HEAD)


class Reference:
    """The reference of one file, with a heading for each section of the file."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def page(self, head: str) -> str:
        """Return the whole page. Raises ``ValueError`` for a key without a description."""
        sections = {name: held for name, held in self._schema["properties"].items() if self._is_section(name, held)}
        plain = {name: held for name, held in self._schema["properties"].items() if name not in sections}
        parts = [head, "## Top level\n", self._table(self._keys({**self._schema, "properties": plain}, ""))]
        for name, held in sections.items():
            parts += self._section(name, held)
        return "\n".join(parts)

    def _section(self, name: str, schema: Schema) -> Iterator[str]:
        required = " Required." if name in self._schema.get("required", ()) else ""
        has_names = any("enum" in each for each in self._alternatives(schema))
        described = self._alternatives(schema)[-1]["description"] if has_names else self._described(name, schema)
        yield f"## {name}\n\n{_text(described)}{required}\n"
        if "discriminator" in schema:
            for kind, reference in schema["discriminator"]["mapping"].items():
                variant = self._resolved({"$ref": reference})
                yield f"### {name} of kind {kind}\n\n{_text(variant['description'])}\n"
                yield self._table(self._keys(variant, f"{name}."))
        elif has_names:
            yield self._table(self._key(name, schema, required=False))
        else:
            yield self._table(self._below(name, schema))

    def _table(self, keys: Iterator[_Key]) -> str:
        return "\n".join([_TABLE, *(key.row() for key in keys)]) + "\n"

    def _keys(self, section: Schema, prefix: str) -> Iterator[_Key]:
        """Yield the keys of a mapping, and after each those below it."""
        for name, schema in section["properties"].items():
            yield from self._key(prefix + name, schema, required=name in section.get("required", ()))

    def _key(self, path: str, schema: Schema, *, required: bool) -> Iterator[_Key]:
        default = "required" if required else _default(schema.get("default"))
        yield _Key(path, self._value(schema), default, _text(self._described(path, schema)))
        yield from self._below(path, schema)

    def _below(self, path: str, schema: Schema) -> Iterator[_Key]:
        for each in self._alternatives(schema):
            if "properties" in each:
                yield from self._keys(each, f"{path}.")
            elif isinstance(each.get("additionalProperties"), dict):
                yield from self._below(f"{path}.NAME", each["additionalProperties"])
            elif isinstance(each.get("items"), dict):
                yield from self._below(f"{path}[]", each["items"])

    def _is_section(self, name: str, schema: Schema) -> bool:
        """Whether a key of the top level has keys below it."""
        return "discriminator" in schema or next(self._below(name, schema), None) is not None

    def _described(self, path: str, schema: Schema) -> str:
        """Return the description of a key, or else of its type."""
        found = schema.get("description") or self._alternatives(schema)[0].get("description")
        if not found:
            raise ValueError(f"`{path}` has no description")
        return str(found)

    def _resolved(self, schema: Schema) -> Schema:
        reference = schema.get("$ref")
        return schema if reference is None else self._schema["$defs"][reference.rpartition("/")[2]]

    def _alternatives(self, schema: Schema) -> list[Schema]:
        """Return the schemas of the values that a key may have, other than null."""
        resolved = map(self._resolved, schema.get("anyOf", [schema]))
        return [each for each in resolved if each.get("type") != "null"]

    def _value(self, schema: Schema) -> str:
        """Return what values a key may have: type, range, names."""
        return " or ".join(self._one_value(each) for each in self._alternatives(schema))

    def _one_value(self, schema: Schema) -> str:
        if "const" in schema:
            return f"`{schema['const']}`"
        if "enum" in schema:
            return ", ".join(f"`{name}`" for name in schema["enum"])
        match schema["type"]:
            case "array" if "prefixItems" in schema:
                return f"list of {len(schema['prefixItems'])}: {self._value(schema['prefixItems'][0])}"
            case "array":
                return f"list of {self._plural(schema['items'])}"
            case "object" if isinstance(schema.get("additionalProperties"), dict):
                return f"mapping of names to {self._plural(schema['additionalProperties'])}"
            case "object":
                return "mapping"
            case "integer" | "number":
                return f"{schema['type']} {_range(schema)}".rstrip()
            case "string":
                return _string(schema)
            case other:
                return str(other)

    def _plural(self, schema: Schema) -> str:
        value = self._value(schema)
        kind, space, limits = value.partition(" ")
        return f"{kind}s{space}{limits}" if kind.isalpha() else value


def _string(schema: Schema) -> str:
    """Return the form of a string. A pattern is described by the meaning of its key."""
    if schema.get("format") == "path":
        return "path"
    length = schema.get("minLength", 0)
    least = f" of {length} characters or more" if length > 1 else ", not empty" if length else ""
    examples = ", ".join(f"`{example}`" for example in schema.get("examples", ()))
    return f"string{least}" + (f", like {examples}" if examples else "")


def _range(schema: Schema) -> str:
    """Return the limits of a number, such as `≥ 0 and < 1` or `1 to 1024`."""
    least, most = schema.get("minimum"), schema.get("maximum")
    below = schema.get("exclusiveMaximum")
    if schema["type"] == "integer" and below is not None:
        most, below = below - 1, None
    if schema["type"] == "integer" and least is not None and most is not None:
        return f"{least} to {_limit(most)}"
    limits = {"≥": least, ">": schema.get("exclusiveMinimum"), "≤": most, "<": below}
    return " and ".join(f"{sign} {_limit(limit)}" for sign, limit in limits.items() if limit is not None)


def _limit(limit: float) -> str:
    exponent = int(limit).bit_length()
    return f"2^{exponent} - 1" if limit >= _LARGE - 1 and limit == (1 << exponent) - 1 else f"{limit:g}"


def _default(value: Any) -> str:
    match value:
        case None | "":
            return "–"
        case bool():
            return f"`{str(value).lower()}`"
        case float():
            return f"{value:g}"
        case int():
            return str(value)
        case _:
            return f"`{value}`"


def _text(description: str) -> str:
    """Return a description in one line; pages of `docs` that it names become links."""
    line = " ".join(description.split())
    return re.sub(r"\bdocs/([\w/-]+\.md)(#[\w-]+)?", lambda found: f"[{found[1]}]({found[1]}{found[2] or ''})", line)


_RPCS = """\
# Who may call which RPC

<!-- Written by `make docs` from the rules in control_plane/service/rpc/_access.py, sync/file_transfer/access.py and
sync/ps/server.py. -->

One interceptor in front of each port checks these rules at the start of a call, and again at each of its messages. An
RPC without a rule is refused. When a certificate is revoked, a user is removed, or gets a new token or another
role, or a job is not shared any more, the calls under way that this concerns end.

- *anyone*: no identity is asked for. *viewer*, *member*, *auditor*, *operator*: the token of a user with this
  [role](users.md#roles); the federation's own token is an operator's.
- *region*: a certificate of a region that is not revoked. *peer*: the same, of another region of the job that the
  server runs. *own agent*: the same, of the server's region.
- *worker*: a token that the region's agent has signed for one worker of the job.
- Of a *job*: everybody may **read** what its own and shared ones are, and their **contents** (code, logs and models); a
  member may **change** its own. An auditor may read all jobs, an operator may do everything with all.
"""


def rpc_reference() -> str:
    """Return the page about who may call which RPC."""
    ports = (
        ("Control port", CONTROL_RULES),
        ("Agent port", AGENT_RULES),
        ("Exchange port of a parameter server, and port for shards", EXCHANGE_RULES),
        ("Port of a parameter server for the region's workers", WORKER_RULES),
    )
    return "\n".join([_RPCS, *(_rules(title, rules) for title, rules in ports)])


def _rules(title: str, rules: Mapping[str, Rule]) -> str:
    rows = [
        f"| `{method.removeprefix('/').rpartition('.')[2]}` | {', '.join(rule.callers)} | {rule.job} | {rule.note} |"
        for method, rule in rules.items()
    ]
    return "\n".join([f"## {title}\n", "| RPC | callers | job | only |", "| --- | --- | --- | --- |", *rows, ""])


def main(folder: Path = DOCS) -> None:
    """Write all pages into a folder."""
    (folder / "job-reference.md").write_text(job_reference(), encoding="utf-8")
    (folder / "region-reference.md").write_text(region_reference(), encoding="utf-8")
    (folder / "chart-reference.md").write_text(chart_reference(), encoding="utf-8")
    (folder / "security-rpcs.md").write_text(rpc_reference(), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
