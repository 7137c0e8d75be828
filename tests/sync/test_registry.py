"""Methods by name: what other packages bring is taken, or refused and told, and stops nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from geofed_pb.errors import GeofedError
from sync.registry import Registry

METHODS = """
class Method:
    def __init__(self, name):
        self.name = name
good, misnamed, taken = Method("good"), Method("other"), Method("built-in")
class Made(Method):
    def __init__(self):
        super().__init__("made")
def broken():
    raise OSError("no such device")
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[object]:  # type: ignore[type-var]
    package = tmp_path / "kinds_of_tests"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_private.py").write_text("raise AssertionError('it holds no methods')")
    (package / "one.py").write_text("class One:\n    name = 'built-in'\nMETHODS = (One(),)\n")
    (tmp_path / "brought_methods.py").write_text(METHODS)
    metadata = tmp_path / "brought-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    points = {
        "good": "brought_methods:good", "made": "brought_methods:Made", "misnamed": "brought_methods:misnamed",
        "built-in": "brought_methods:taken", "broken": "brought_methods:broken", "gone": "no_such_module:thing",
        "odd": "brought_methods:Method",
    }  # fmt: skip
    lines = [f"{name} = {target}" for name, target in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[geofed.tests]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("kinds_of_tests", "brought_methods"):
        sys.modules.pop(name, None)
    return Registry("kind", "kinds_of_tests", "geofed.tests", lambda method, _: "odd" if method.name == "odd" else "")


def test_built_in_and_brought_methods_are_found(registry: Registry[object]) -> None:  # type: ignore[type-var]
    assert set(registry.all) == {"built-in", "good", "made"}
    assert type(registry.named("built-in")).__name__ == "One"
    assert type(registry.named("made")).__name__ == "Made"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("misnamed", "'other'"),
        ("broken", "OSError: no such device"),
        ("gone", "No module named 'no_such_module'"),
        ("odd", "TypeError"),
    ],
)
def test_what_cannot_be_taken_says_why(
    registry: Registry[object],  # type: ignore[type-var]
    name: str,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(GeofedError, match=why) as caught:
        registry.named(name)
    assert caught.value.code == "CONFIG_INVALID"
    assert name in caplog.text


def test_an_unknown_name_is_told_with_those_that_are_known(registry: Registry[object]) -> None:  # type: ignore[type-var]
    with pytest.raises(GeofedError, match="unknown kind 'gzip'") as caught:
        registry.named("gzip")
    assert caught.value.hint == "known: built-in, good, made"
