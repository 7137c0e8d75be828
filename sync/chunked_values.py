"""Vectors and optimiser states that are stored in a channel in parts, so that no process needs memory for the whole.

The key itself holds a short frame that states which part contains what; part ``n`` has the key ``key.n``. Workers that
hold a stage of a model put one part each, and their parameter server assembles the whole; what the server puts, they
read in part. A value that was put in one piece is read by the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from sync import framing
from sync.channel import Channel
from sync.layout import Vector

__all__ = [
    "Span",
    "forget",
    "part_key",
    "put_blocks",
    "put_index",
    "put_owners",
    "put_state",
    "put_vector",
    "read_slices",
    "read_state",
    "read_vector",
]

Span = tuple[int, int, int]
"""(part, start, stop): the part's next values are the coordinates from start to stop of the whole vector."""
_SPANS, _OWNERS, _PARTS = "spans", "owners", "parts"


def part_key(key: str, part: int) -> str:
    """Return the key of a part."""
    return f"{key}.{part}"


def put_index(channel: Channel, key: str, spans: Sequence[Span] = (), *, parts: int) -> None:
    """Put the index of a vector, which states what its parts contain. The parts are put separately."""
    table = np.array(spans, np.int64).reshape(len(spans), 3)
    channel.put(key, framing.encode({_SPANS: table}, {_PARTS: parts}))


def put_owners(channel: Channel, key: str, owners: Sequence[tuple[int, int]], *, parts: int) -> None:
    """Put the index of an optimiser's state: (parameter, part) pairs of numbers. The parts are put separately."""
    table = np.array(owners, np.int64).reshape(len(owners), 2)
    channel.put(key, framing.encode({_OWNERS: table}, {_PARTS: parts}))


def put_vector(channel: Channel, key: str, name: str, vector: Vector, elements: int) -> None:
    """Put a vector in parts of so many elements, the index last; 0: in one piece."""
    if not elements:
        channel.put(key, framing.encode({name: vector}))
        return
    starts = range(0, vector.size, elements)
    spans = [(part, start, min(start + elements, vector.size)) for part, start in enumerate(starts)]
    for part, start, stop in spans:
        channel.put(part_key(key, part), framing.encode({name: vector[start:stop]}))
    put_index(channel, key, spans, parts=len(spans))


def put_blocks(
    channel: Channel, key: str, name: str, size: int, blocks: Callable[[], Iterator[Vector]], elements: int
) -> None:
    """Put a vector, shape (size,), that is made block by block, like `put_vector`; ``blocks`` may be called again."""
    if not elements:
        channel.put_made(key, lambda: framing.encode_blocks(name, size, blocks(), {}))
        return
    vector, at = np.empty(size, np.float32), 0
    for block in blocks():
        vector[at : at + block.size] = block
        at += block.size
    put_vector(channel, key, name, vector, elements)


def read_vector(channel: Channel, key: str, name: str) -> Vector | None:
    """Return the whole vector, or None if it or a part of it does not exist (any more)."""
    value = channel.get(key)
    if value is None:
        return None
    frame = framing.decode(value)
    if _PARTS not in frame.facts:
        return np.asarray(frame.tensors[name], np.float32)
    spans = _spans(frame)
    out = np.empty(max((stop for _, _, stop in spans), default=0), np.float32)
    return out if _fill(channel, key, name, spans, [(slice(0, out.size), out)]) else None


def read_slices(channel: Channel, key: str, name: str, slices: Sequence[slice]) -> Vector | None:
    """Return some ranges of a vector, concatenated, or None if a part does not exist. Reads only the parts that contain
    them, one at a time."""
    value = channel.get(key)
    if value is None:
        return None
    frame = framing.decode(value)
    if _PARTS not in frame.facts:
        whole = np.asarray(frame.tensors[name], np.float32)
        return np.concatenate([whole[part] for part in slices]) if slices else np.empty(0, np.float32)
    out = np.empty(sum(part.stop - part.start for part in slices), np.float32)
    wanted, at = [], 0
    for part in slices:
        wanted.append((part, out[at : at + part.stop - part.start]))
        at += part.stop - part.start
    return out if _fill(channel, key, name, _spans(frame), wanted) else None


def put_state(channel: Channel, key: str, state: framing.Frame, bytes_at_once: int) -> None:
    """Put an optimiser's state in parts of about so many bytes. Its tensors are named ``parameter/key``."""
    sizes: dict[int, int] = {}
    for name in (*state.tensors, *state.facts):
        sizes.setdefault(_owner(name), 0)
        sizes[_owner(name)] += state.tensors[name].nbytes if name in state.tensors else 0
    owners: list[tuple[int, int]] = []
    part, filled = 0, 0
    for owner, size in sorted(sizes.items()):
        if filled and filled + size > bytes_at_once:
            part, filled = part + 1, 0
        owners.append((owner, part))
        filled += size
    parts = dict(owners)
    for number in range(part + 1 if owners else 0):
        tensors = {name: array for name, array in state.tensors.items() if parts[_owner(name)] == number}
        facts = {name: value for name, value in state.facts.items() if parts[_owner(name)] == number}
        channel.put(part_key(key, number), framing.encode(tensors, facts))
    put_owners(channel, key, owners, parts=part + 1 if owners else 0)


def read_state(channel: Channel, key: str, parameters: range | None = None) -> framing.Frame | None:
    """Return the state of some parameters, or of all; None if it or a part of it does not exist (any more)."""
    value = channel.get(key)
    if value is None:
        return None
    frame = framing.decode(value)
    numbers: Iterable[int] = (-1,)
    if _PARTS in frame.facts:
        numbers = range(int(frame.facts[_PARTS]))
        if parameters is not None and _OWNERS in frame.tensors:
            table = np.asarray(frame.tensors[_OWNERS], np.int64)
            numbers = sorted({int(part) for owner, part in table if _wanted(int(owner), parameters)})
    tensors: dict[str, framing.Array] = {}
    facts: dict[str, float] = {}
    for number in numbers:
        if number >= 0:
            value = channel.get(part_key(key, number))
            if value is None:
                return None
            frame = framing.decode(value)
        if parameters is None:
            tensors, facts = tensors | frame.tensors, facts | frame.facts
            continue
        tensors |= {name: one for name, one in frame.tensors.items() if _wanted(_owner(name), parameters)}
        facts |= {name: one for name, one in frame.facts.items() if _wanted(_owner(name), parameters)}
    return framing.Frame(tensors, facts)


def forget(channel: Channel, key: str) -> None:
    """Delete a value and its parts; the index first, so that no process begins to read it."""
    value = channel.get(key)
    if value is None:
        return
    facts = framing.decode(value).facts
    channel.delete(key)
    if facts.get(_PARTS):
        channel.delete_many([part_key(key, number) for number in range(int(facts[_PARTS]))])


def _fill(channel: Channel, key: str, name: str, spans: Sequence[Span], wanted: Sequence[tuple[slice, Vector]]) -> bool:
    """Copy the wanted ranges from the parts that contain them; return False if a part does not exist."""
    for number in sorted({part for part, start, stop in spans for where, _ in wanted if _meets(where, start, stop)}):
        value = channel.get(part_key(key, number))
        if value is None:
            return False
        held: npt.NDArray[np.float32] = np.asarray(framing.decode(value).tensors[name], np.float32)
        at = 0
        for part, start, stop in spans:
            if part != number:
                continue
            for where, target in wanted:
                low, high = max(start, where.start), min(stop, where.stop)
                if low < high:
                    target[low - where.start : high - where.start] = held[at + low - start : at + high - start]
            at += stop - start
    return True


def _meets(where: slice, start: int, stop: int) -> bool:
    return bool(where.start < stop and start < where.stop)


def _spans(frame: framing.Frame) -> list[Span]:
    return [(int(part), int(start), int(stop)) for part, start, stop in frame.tensors[_SPANS]]


def _wanted(owner: int, parameters: range) -> bool:
    """Whether state is wanted; state of no parameter, with a number below 0, always is."""
    return owner < 0 or owner in parameters


def _owner(name: str) -> int:
    return int(name.split("/", 1)[0])
