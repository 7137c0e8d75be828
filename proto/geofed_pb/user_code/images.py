"""Names of container images, and lists of those that a region lets tasks name."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["IMAGE", "LONGEST_IMAGE", "is_allowed_image", "is_image_entry"]

_HOST = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(:[0-9]{1,5})?"
_PART = r"[a-z0-9]+(([.]|_{1,2}|-{1,8})[a-z0-9]+)*"
IMAGE = rf"^({_HOST}/)?{_PART}(/{_PART})*(:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?$"
"""Pattern of an image, as `registry/folder/name:tag@sha256:digest`: the grammar of the CNCF's `distribution`, with
sha256 as the only digest."""
LONGEST_IMAGE = 512
"""Most characters of an image: registries limit a name to 255, and tag and digest take 201 at most."""


def is_image_entry(entry: str) -> bool:
    """Whether a text is an image, or the beginning of images, which ends with `/`, `:` or `@`."""
    return _is_image(entry[:-1] if entry.endswith(("/", ":", "@")) else entry)


def is_allowed_image(image: str, entries: Iterable[str]) -> bool:
    """Whether a list allows an image: it has the image itself, or its beginning.

    A beginning that ends with `/` allows all images of a folder of a registry; with `:` or `@`, all tags or digests of
    one image.
    """
    return _is_image(image) and any(_allows(entry, image) for entry in entries)


def _allows(entry: str, image: str) -> bool:
    if not entry.endswith(("/", ":", "@")):
        return image == entry
    # After `host:` a port may follow, and then any image of that host.
    return image.startswith(entry) and (entry.endswith("/") or "/" not in image.removeprefix(entry))


def _is_image(text: str) -> bool:
    return len(text) <= LONGEST_IMAGE and re.fullmatch(IMAGE, text) is not None
