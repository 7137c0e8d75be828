"""Names of images, and what a list of them allows."""

from __future__ import annotations

import pytest

from geofed_pb.user_code.images import LONGEST_IMAGE, is_allowed_image, is_image_entry

DIGEST = f"sha256:{'ab' * 32}"
WORKER = "registry.example.org:5000/team/worker"


@pytest.mark.parametrize(
    ("entry", "allowed", "others"),
    [
        (f"{WORKER}@{DIGEST}", [f"{WORKER}@{DIGEST}"], [WORKER, f"{WORKER}:1", f"{WORKER}@sha256:{'cd' * 32}"]),
        (f"{WORKER}:1", [f"{WORKER}:1"], [f"{WORKER}:1.1", f"{WORKER}:1@{DIGEST}"]),
        (f"{WORKER}:", [f"{WORKER}:1", f"{WORKER}:1@{DIGEST}"], [WORKER, f"{WORKER}-evil:1", f"{WORKER}@{DIGEST}"]),
        (f"{WORKER}@", [f"{WORKER}@{DIGEST}"], [f"{WORKER}:1@{DIGEST}"]),
        (
            "registry.example.org:5000/team/",
            [WORKER, f"{WORKER}:1", "registry.example.org:5000/team/a/b:1"],
            ["registry.example.org:5000/other/worker", "registry.example.org:5000/team/../other/worker", "team/worker"],
        ),
        ("registry.example.org:", [], ["registry.example.org:5000/evil", WORKER]),
        ("geofed-worker", ["geofed-worker"], ["geofed-worker:1", "geofed-worker2"]),
    ],
)
def test_a_list_allows_an_image_or_those_that_begin_so(entry: str, allowed: list[str], others: list[str]) -> None:
    assert is_image_entry(entry)
    assert [one for one in (*allowed, *others) if is_allowed_image(one, [entry])] == allowed
    assert not any(is_allowed_image(one, []) for one in allowed)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "/", "a b", "a/../b", "Team/worker/", "a:1:2", "a@md5:00", "a@sha256:00", "-a", "a//b", "a:1\n",
        "a" * (LONGEST_IMAGE + 1), "https://registry.example.org/a",
    ],
)  # fmt: skip
def test_other_texts_are_no_images(text: str) -> None:
    assert not is_allowed_image(text, [text, "a/", "a:"])
    assert text.endswith("/worker/") or not is_image_entry(text)
