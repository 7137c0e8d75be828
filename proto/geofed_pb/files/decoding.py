"""What may arrive as a message of an RPC: bytes of its type, with numbers that every database and language can hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

__all__ = ["Undecodable", "decoding", "too_large"]

_LARGEST_NUMBER = (1 << 63) - 1
"""Largest number of a uint64 field: SQL has no larger integers."""


class Undecodable:
    """Stands for a message that is refused; gRPC itself would log a traceback for each one."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def decoding(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a decoder that returns an `Undecodable` for what it refuses."""

    def decoded(data: bytes) -> Any:
        try:
            message = decode(data)
        except DecodeError:
            return Undecodable("the bytes are no message of this type")
        if isinstance(message, Message) and (name := too_large(message)):
            return Undecodable(f"{name} exceeds {_LARGEST_NUMBER}")
        return message

    return decoded


def too_large(message: Message) -> str:
    """Return the name of the first field with a number above 2^63 - 1; empty: there is none."""
    if not _has_numbers(message.DESCRIPTOR):
        return ""
    for field, value in message.ListFields():
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            values, kind = value.values(), kind.fields_by_name["value"].message_type
        else:
            values = value if field.is_repeated else (value,)
        if kind is not None:
            found = next(filter(None, map(too_large, values)), "") if _has_numbers(kind) else ""
        elif isinstance(first := next(iter(values), None), int) and not isinstance(first, bool):
            found = field.name if max(values) > _LARGEST_NUMBER else ""
        else:
            found = ""
        if found:
            return found
    return ""


@cache
def _has_numbers(kind: Descriptor, within: frozenset[str] = frozenset()) -> bool:
    """Whether a message of a type can have a number that is too large. Most can't, as those that carry bytes."""
    within |= {kind.full_name}
    return any(
        field.type in (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64)
        or (
            field.message_type is not None
            and field.message_type.full_name not in within
            and _has_numbers(field.message_type, within)
        )
        for field in kind.fields
    )
