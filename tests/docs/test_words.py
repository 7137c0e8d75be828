"""One word for one thing: words that had another name in the field do not come back."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTEAD = {
    "courier": "peer sender",
    "shelf": "channel store",
    "attendance": "membership",
    "spares": "buffer pool",
    "crew": "worker group",
    "lapsed": "state lost",
    "promptness": "scheduling latency",
    "weighed": "probed, or evaluated",
    "weighing": "probing, or evaluating",
    "planned anew": "replanned",
    "anew": "again",
    "beware": "warning",
    "dealt out": "partitioned",
    "goes on": "continues",
    "foretold": "predicted",
    "not told again": "shown once",
    "let a user in": "create a user",
}


def _texts() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = listed.stdout.split() or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    kept = [ROOT / name for name in names if name.endswith((".py", ".md", ".proto", ".html", ".yaml"))]
    return [path for path in kept if path.exists() and path != Path(__file__) and "_pb2" not in path.name]


@pytest.mark.parametrize("word", INSTEAD)
def test_the_word_is_not_used(word: str) -> None:
    pattern = re.compile(rf"(?<![a-z]){re.escape(word)}(?![a-z])", re.IGNORECASE)
    found = [str(path.relative_to(ROOT)) for path in _texts() if pattern.search(path.read_text())]
    assert not found, f"say {INSTEAD[word]}"


def test_the_glossary_is_in_order_and_says_each_word_once() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = [row for row in rows if row not in ("word", "---")]
    assert words == sorted(words, key=str.lower)
    assert len(words) == len(set(words))
