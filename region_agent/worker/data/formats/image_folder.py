"""Folders of images, one folder for each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from geofed_pb.errors import GeofedError
from region_agent.worker.data.formats.pictures import ENDINGS, decoded, held_bytes, require_pillow, stacked_images
from region_agent.worker.data.formats.tables import data_files
from region_agent.worker.data.index import Block, BlockIndex
from region_agent.worker.data.sources import Sources
from region_agent.worker.data.spec import FormatSpec

if TYPE_CHECKING:
    import torch

__all__ = ["ImageFolderFormat"]

_CLASS = "label"


class ImageFolderFormat:
    """Images in folders that are named by their classes. Samples are counted by the names of the files."""

    kind = "image-folder"
    options = ("classes", "size")

    def index(self, spec: FormatSpec, sources: Sources) -> BlockIndex:
        """Index a split by its files, without reading them."""
        require_pillow(self.kind)
        found = [number for number in data_files(sources) if _ending(sources.file(number).name) in ENDINGS]
        if not found:
            raise GeofedError("SHARD_UNREADABLE", f"there is no image: their names end with {', '.join(ENDINGS)}")
        classes = spec.classes or tuple(sorted({_class_of(sources.file(number).name, spec) for number in found}))
        blocks = []
        for number in found:
            name = sources.file(number).name
            if _class_of(name, spec) not in classes:
                text = f"{name}: {_class_of(name, spec)!r} is none of the classes {', '.join(classes[:20])}"
                raise GeofedError("SHARD_UNREADABLE", text, hint="add it to `format.classes` in the region's file")
            size = sources[number].size
            blocks.append(Block(number, 0, size, 1, held_bytes(size, spec.size)))
        return BlockIndex.of(blocks, {"image": "uint8", _CLASS: f"int64, {' '.join(classes)}"})

    def reader(self, spec: FormatSpec, sources: Sources, index: BlockIndex) -> _ImageReader:
        """Return a reader."""
        require_pillow(self.kind)
        classes = index.schema[_CLASS].partition(", ")[2].split(" ")
        return _ImageReader(sources, index, spec, classes)


def _ending(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _class_of(name: str, spec: FormatSpec) -> str:
    # With a folder for each client, the folders of the classes lie in these.
    within = name.partition("/")[2] if spec.clients == "folder" else name
    folder, inside, _ = within.partition("/")
    if not inside:
        text = f"{name} lies in no folder that names its class"
        raise GeofedError("SHARD_UNREADABLE", text, hint="write the split's uri with a / at its end")
    if " " in folder:
        raise GeofedError("SHARD_UNREADABLE", f"{name}: the name of a class has a space")
    return folder


class _ImageReader:
    def __init__(self, sources: Sources, index: BlockIndex, spec: FormatSpec, classes: Sequence[str]) -> None:
        self._sources, self._index, self._spec = sources, index, spec
        self._labels = {name: label for label, name in enumerate(classes)}

    def load(self, number: int) -> dict[str, Any]:
        """Read and decode an image."""
        import torch

        block = self._index.block(number)
        source = self._sources[block.file]
        image = decoded(source.read(0, block.length), source.name, self._spec.size)
        return {"image": image, _CLASS: torch.tensor(self._labels[_class_of(source.name, self._spec)])}

    def samples(self, blocks: Sequence[Any], places: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return images with their labels."""
        return [blocks[block] for block, _ in places]

    def batch(self, blocks: Sequence[Any], places: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        """Return images of shape (n, 3, height, width), and labels of shape (n,)."""
        import torch

        found = self.samples(blocks, places)
        labels = torch.stack([one[_CLASS] for one in found])
        return {"image": stacked_images([one["image"] for one in found]), _CLASS: labels}
