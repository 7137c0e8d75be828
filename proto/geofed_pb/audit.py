"""An audit log that cannot be changed unnoticed: a chain of hashes, whose head is signed.

Each entry's hash is SHA-256 over the hash before it, a line feed and the entry's text; a head is the number and the
hash of the last entry, signed with Ed25519. Whoever has a head that was signed earlier finds out whether an entry up to
it was changed, dropped or put elsewhere (Haber and Stornetta 1991; Crosby and Wallach 2009). This module decides, and
reads and writes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = [
    "GENESIS", "AuditBroken", "Head", "Verified", "entry_line", "hash_of", "head_line", "header_line",
    "public_key_of", "verify",
]  # fmt: skip

GENESIS = "0" * 64
"""Hash before the first entry."""
_FORMAT = "geofed-audit/1"
_HASH_CHARACTERS = 64
_SIGNATURE_CHARACTERS = 128
_MAX_LINE = 1 << 20
"""Longest line of a file, in characters; entries are far shorter."""


class AuditBroken(ValueError):
    """A log is not what was recorded; the text says where."""


def hash_of(before: str, text: str) -> str:
    """Return the hash of an entry; ``before``: that of the entry before it."""
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()


def public_key_of(key: Ed25519PrivateKey) -> str:
    """Return the public key in hexadecimal, 64 characters."""
    return key.public_key().public_bytes_raw().hex()


@dataclass(frozen=True)
class Head:
    """The last entry of a log at some time."""

    seq: int
    """Number of the entry; the first one is 1."""
    hash: str
    at: float
    """When it was signed, in Unix seconds."""
    public_key: str
    signature: str = ""
    """Of all of the above."""

    @property
    def _signed(self) -> bytes:
        return json.dumps([_FORMAT, self.seq, self.hash, self.at, self.public_key]).encode()

    @classmethod
    def sign(cls, key: Ed25519PrivateKey, seq: int, hash_: str, at: float) -> Head:
        """Return a signed head."""
        head = cls(seq, hash_, at, public_key_of(key))
        return cls(seq, hash_, at, head.public_key, key.sign(head._signed).hex())

    @classmethod
    def read(cls, value: Any) -> Head:
        """Return a head that came from elsewhere. Raises ``AuditBroken`` unless its signature is its key's."""
        kinds: dict[str, Any] = {"seq": int, "hash": str, "at": (int, float), "public_key": str, "signature": str}
        names = [field.name for field in fields(cls)]
        if not isinstance(value, dict) or set(value) != set(names):
            raise AuditBroken("it is no head of a log")
        if any(not isinstance(value[name], kinds[name]) or isinstance(value[name], bool) for name in names):
            raise AuditBroken("it is no head of a log")
        head = cls(**{**value, "at": float(value["at"])})
        long = len(head.hash) != _HASH_CHARACTERS or len(head.public_key) != _HASH_CHARACTERS
        if long or len(head.signature) != _SIGNATURE_CHARACTERS or head.seq < 0:
            raise AuditBroken("it is no head of a log")
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(head.public_key))
            key.verify(bytes.fromhex(head.signature), head._signed)
        except (ValueError, InvalidSignature):
            raise AuditBroken(f"the signature of head {head.seq} is not of the key that it names") from None
        return head


def header_line(federation: str) -> str:
    """Return the first line of a file."""
    return json.dumps({"format": _FORMAT, "federation": federation})


def entry_line(text: str, hash_: str) -> str:
    """Return the line of an entry."""
    return json.dumps({"entry": text, "hash": hash_}, ensure_ascii=False)


@dataclass(frozen=True)
class Verified:
    """A log whose entries are what was recorded, up to its head."""

    federation: str
    head: Head
    kinds: dict[str, int]
    """Number of entries by kind."""
    witnessed: int
    """Number of heads of others that this log agrees with."""
    witnessed_seq: int
    """Number of the last entry that such a head covers; 0: none."""


def verify(lines: Iterable[str], *, public_key: str = "", witnesses: Iterable[Head] = ()) -> Verified:
    """Check a file of a log.

    Args:
        lines: of the file, without their ends.
        public_key: the one that the head must be signed with; empty: the one that the file names.
        witnesses: heads that others have received earlier.

    Raises ``AuditBroken`` at the first line that is not what was recorded.
    """
    found = _parsed(lines)
    header = next(found, (0, {}))[1]
    if header.get("format") != _FORMAT or not isinstance(federation := header.get("federation"), str):
        raise AuditBroken(f"line 1: it is no audit log of format {_FORMAT}")
    witnesses = list(witnesses)
    wanted = {one.seq for one in witnesses}
    hashes: dict[int, str] = {}
    before, seq, kinds, head = GENESIS, 0, Counter[str](), None
    for number, line in found:
        if head is not None:
            raise AuditBroken(f"line {number}: there is more after the head")
        if "head" in line:
            head = _checked_head(number, line["head"], seq, before)
            continue
        text = line.get("entry")
        if not isinstance(text, str) or line.get("hash") != (hashed := hash_of(before, text)):
            raise AuditBroken(f"line {number}: entry {seq + 1} is not the one that was recorded here")
        before, seq = hashed, seq + 1
        kinds[_kind(number, text, seq)] += 1
        if seq in wanted:
            hashes[seq] = before
    if head is None:
        raise AuditBroken("the file ends before the head of the log")
    if public_key and head.public_key != public_key:
        raise AuditBroken(f"the head is signed with the key {head.public_key}, not {public_key}")
    _compare(head, hashes, witnesses)
    return Verified(federation, head, dict(kinds), len(witnesses), max(wanted, default=0))


def _compare(head: Head, hashes: dict[int, str], witnesses: list[Head]) -> None:
    """Compare a log with the heads that witnesses have; ``hashes``: of its entries with their numbers."""
    if foreign := next((one for one in witnesses if one.public_key != head.public_key), None):
        text = (
            f"a witness has a head that is signed with another key, {foreign.public_key}: either it is of another log"
        )
        raise AuditBroken(f"{text}, or this log was signed anew with the key {head.public_key}")
    for one in witnesses:
        if one.seq > head.seq:
            raise AuditBroken(
                f"entries {head.seq + 1} to {one.seq} are missing: a witness has received a head with them"
            )
        if one.seq and hashes[one.seq] != one.hash:
            raise AuditBroken(f"the log up to entry {one.seq} differs from what a witness has received")


def _parsed(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line) if len(line) <= _MAX_LINE else None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise AuditBroken(f"line {number}: it is no line of an audit log")
        yield number, value


def _checked_head(number: int, value: Any, seq: int, hash_: str) -> Head:
    try:
        head = Head.read(value)
    except AuditBroken as error:
        raise AuditBroken(f"line {number}: {error}") from None
    if (head.seq, head.hash) != (seq, hash_):
        raise AuditBroken(f"line {number}: the head is of entry {head.seq}, not of the last one, {seq}")
    return head


def _kind(number: int, text: str, seq: int) -> str:
    try:
        facts = json.loads(text)
        if facts["seq"] != seq:
            raise AuditBroken(f"line {number}: the entry has the number {facts['seq']}, not {seq}")
        return str(facts["kind"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise AuditBroken(f"line {number}: it is no entry of an audit log") from None


def head_line(head: Head) -> str:
    """Return the last line of a file."""
    return json.dumps({"head": asdict(head)})
