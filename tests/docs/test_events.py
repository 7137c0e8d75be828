"""The page about events names every kind that the code records, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOTTED = re.compile(r'(?:\brecord|_record|Record|_enter_region)\(\s*f?"([a-z-]+\.[a-z-]+)"')
PHASE = re.compile(r'_enter\("([a-z]+)"')


def _code(*folders: str) -> str:
    return "\n".join(path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


def test_every_kind_is_on_the_page() -> None:
    told = set(re.findall(r"^\| `([a-z.-]+)` \|", (ROOT / "docs" / "events.md").read_text(), re.MULTILINE))
    plane, agent = _code("control_plane"), _code("region_agent")
    kinds = set(DOTTED.findall(plane)) | set(re.findall(r'RecordEvent\("([a-z.-]+)"', agent))
    kinds |= set(re.findall(r'_after_failure\([^"]*"([a-z-]+)"', agent))
    assert len(kinds) > 10
    assert kinds <= told
    known = plane + agent
    unknown = [k for k in told if k not in {"cursor", "at", "job", "region", "kind", "text", "data", "terminal"}]
    assert not [kind for kind in unknown if f'"{kind}"' not in known and f'"{kind.partition(".")[2]}"' not in known]
