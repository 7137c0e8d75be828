"""Text for language models: packed into sequences, byte by byte or by a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from region_agent.worker.data.formats.contract import missing_package
from region_agent.worker.data.formats.lines import line_blocks
from region_agent.worker.data.formats.tables import data_files
from region_agent.worker.data.index import Block, BlockIndex, least_block_bytes
from region_agent.worker.data.sources import Source, Sources, file_faults
from region_agent.worker.data.spec import FormatSpec

if TYPE_CHECKING:
    import torch

__all__ = ["JsonLinesFormat", "TextFormat", "TextReader"]

_END = 256
"""Token after each document, and where a sequence has no text."""
_IGNORED = -100
"""Label of what is no text, as torch's ``cross_entropy`` expects it."""
_LEAST_SEQUENCES = 32
"""Fewest sequences of a block, so that few have to be filled up at its end."""
_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
"""Usual names of a tokenizer's token for the end of a document."""
Tokens = npt.NDArray[np.uint16]


class TextFormat:
    """Plain text; each file is a document. Samples are counted by reading the files once."""

    kind = "text"
    options: tuple[str, ...] = ("sequence",)

    def index(self, spec: FormatSpec, sources: Sources) -> BlockIndex:
        """Index a split in blocks of lines."""
        blocks = []
        for number in data_files(sources):
            source = sources[number]
            with file_faults(source.name, RecursionError):
                least = max(least_block_bytes(source.size), _LEAST_SEQUENCES * spec.sequence)
                for at, content in line_blocks(source, least=least):
                    tokens = self.tokens(spec, content, at, source)
                    held = tokens.nbytes
                    blocks.append(Block(number, at, len(content), -(-len(tokens) // spec.sequence), held))
        return BlockIndex.of(blocks, {"input_ids": f"{spec.sequence} bytes", "labels": f"{spec.sequence} bytes"})

    def reader(self, spec: FormatSpec, sources: Sources, index: BlockIndex) -> TextReader:
        """Return a reader."""
        return TextReader(self, spec, sources, index)

    def tokens(self, spec: FormatSpec, content: bytes, at: int, source: Source) -> Tokens:
        """Return a block's bytes, and 256 at the end of the file."""
        found = np.frombuffer(content, np.uint8).astype(np.uint16)
        return np.append(found, np.uint16(_END)) if at + len(content) == source.size else found


class JsonLinesFormat(TextFormat):
    """A JSON object on each line, whose text is a document."""

    kind = "jsonl"
    options = ("sequence", "field")

    def tokens(self, spec: FormatSpec, content: bytes, at: int, source: Source) -> Tokens:
        """Return the texts' bytes in UTF-8, each followed by 256. Raises ``GeofedError("SHARD_UNREADABLE")``."""
        parts: list[Tokens] = []
        for text in self._texts(spec, content, at, source.name):
            parts += [np.frombuffer(text.encode(), np.uint8).astype(np.uint16), np.array([_END], np.uint16)]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint16)

    def _texts(self, spec: FormatSpec, content: bytes, at: int, name: str) -> Iterator[str]:
        for line in content.splitlines(keepends=True):
            if line.strip():
                with file_faults(f"{name}, byte {at:,}", RecursionError):
                    found = json.loads(line)
                if not isinstance(found, dict) or not isinstance(found.get(spec.field), str):
                    text = f"{name}, byte {at:,}: the line is no object with a text {spec.field!r}"
                    raise GeofedError("SHARD_UNREADABLE", text, hint="correct the line, or state `format.field`")
                yield found[spec.field]
            at += len(line)


class TextReader:
    """Takes sequences out of blocks of text."""

    def __init__(self, form: TextFormat, spec: FormatSpec, sources: Sources, index: BlockIndex) -> None:
        self._form, self._spec, self._sources, self._index = form, spec, sources, index
        self._tokenizer: Any = None
        self._end: int | None = None

    def use_tokenizer(self, path: Path) -> None:
        """Make tokens by a file of the package tokenizers, instead of bytes.

        Raises ``GeofedError``: CONFIG_INVALID if the package is not installed, TASK_INVALID for another file.
        """
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            raise missing_package("tokenizers", self._form.kind) from None
        try:
            self._tokenizer = Tokenizer.from_str(path.read_text())
        except Exception as error:  # noqa: BLE001 - the package raises plain exceptions for any fault
            raise GeofedError("TASK_INVALID", f"{path.name} is no file of a tokenizer: {error}"[:300]) from None
        known = (self._tokenizer.token_to_id(name) for name in _ENDS)
        self._end = next((one for one in known if one is not None), None)

    def load(self, number: int) -> Tokens:
        """Read a block as bytes, of shape (sequences, length)."""
        block = self._index.block(number)
        source = self._sources[block.file]
        with file_faults(source.name, RecursionError):
            content = source.read(block.offset, block.length)
            tokens = self._form.tokens(self._spec, content, block.offset, source)
        length = self._spec.sequence
        if -(-len(tokens) // length) != block.samples:
            raise GeofedError("SHARD_UNREADABLE", f"{source.name}: other text than when the job began")
        # A value that is no token marks what is no text.
        filled = np.full(block.samples * length, np.iinfo(np.uint16).max, np.uint16)
        filled[: len(tokens)] = tokens
        return filled.reshape(block.samples, length)

    def samples(self, blocks: Sequence[Any], places: Sequence[tuple[int, int]]) -> list[dict[str, torch.Tensor]]:
        """Return sequences: tokens, and labels that equal them, but for what is no text."""
        rows = [blocks[block][place] for block, place in places]
        if self._tokenizer is not None:
            return [{"input_ids": one, "labels": one} for one in self._tokenised(rows)]
        return [{name: column[at] for name, column in _of_bytes(rows).items()} for at in range(len(rows))]

    def batch(self, blocks: Sequence[Any], places: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        """Return tokens and labels of shape (n, length); sequences of a tokenizer are filled up to the longest one."""
        import torch

        rows = [blocks[block][place] for block, place in places]
        if self._tokenizer is None:
            return _of_bytes(rows)
        found = self._tokenised(rows)
        shape = len(found), max(len(one) for one in found)
        tokens, labels = torch.full(shape, self._end or 0), torch.full(shape, _IGNORED)
        for at, one in enumerate(found):
            tokens[at, : len(one)] = labels[at, : len(one)] = one
        return {"input_ids": tokens, "labels": labels}

    def _tokenised(self, rows: Sequence[Tokens]) -> list[torch.Tensor]:
        import torch

        made = []
        for row in rows:
            text = row[row <= _END]
            cuts = np.flatnonzero(text == _END)
            parts = [
                part[part < _END].astype(np.uint8).tobytes().decode(errors="ignore") for part in np.split(text, cuts)
            ]
            ids: list[int] = []
            for at, encoded in enumerate(self._tokenizer.encode_batch(parts, add_special_tokens=False)):
                ids += [self._end] if at and self._end is not None else []
                ids += encoded.ids
            made.append(torch.tensor(ids or [self._end or 0]))
        return made


def _of_bytes(rows: Sequence[Tokens]) -> dict[str, torch.Tensor]:
    import torch

    whole = torch.from_numpy(np.stack(rows).astype(np.int64))
    text = whole <= _END
    return {"input_ids": whole.where(text, _END), "labels": whole.where(text, _IGNORED)}
