"""An audit log that cannot be changed unnoticed: a chain of hashes, whose head is signed.

Each entry's hash is SHA-256 over the hash before it, a line feed and the entry's text; a head is the number and the
hash of the last entry, signed with Ed25519. Whoever has a head that was signed earlier finds out whether an entry up to
it was changed, dropped or put elsewhere (Haber and Stornetta 1991; Crosby and Wallach 2009). This module decides, and
reads and writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from geofed_pb.bounds import NAME_BYTES, clean

__all__ = [
    "GENESIS", "AnotherLog", "AuditBroken", "Head", "Verified", "Witness", "bounded_facts", "bounded_texts",
    "entry_line", "entry_text", "hash_of", "head_line", "header_line", "public_key_of", "verify", "witness_of",
]  # fmt: skip

GENESIS = "0" * 64
"""Hash before the first entry."""
_FORMAT = "geofed-audit/1"
_HASH_CHARACTERS = 64
"""Hexadecimal digits of a SHA-256, and of a public key of Ed25519."""
_LATEST = 1e12
"""Unix seconds that no clock shows."""
_SIGNATURE_CHARACTERS = 128
"""Hexadecimal digits of a signature of Ed25519: 64 bytes."""
_FACT_BYTES = 16 << 10
"""Longest value in an entry, as JSON. Metrics and errors of many regions may be longer."""
_MAX_LINE = 1 << 20
"""Longest line of a file, in characters; entries are far shorter."""


class AuditBroken(ValueError):
    """A log is not what was recorded; the text says where."""


class AnotherLog(AuditBroken):
    """A file is of another log than the one that was asked for, or is none."""


def hash_of(before: str, text: str) -> str:
    """Return the hash of an entry; ``before``: that of the entry before it."""
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()


def bounded_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an entry says, with a digest in the place of each value that is too long to be read again, and
    none in that of what is no number."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, float) and not math.isfinite(value):
            found[name] = None
            continue
        text = json.dumps(value).encode()
        long = {"sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)}
        found[name] = value if len(text) <= _FACT_BYTES else long
    return found


def bounded_texts(value: Any) -> Any:
    """Return facts with all texts clean and bounded, at any depth: keys, too."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(str(key), NAME_BYTES): bounded_texts(one) for key, one in value.items()}
    return [bounded_texts(one) for one in value] if isinstance(value, list) else value


def entry_text(seq: int, facts: Mapping[str, Any]) -> str:
    """Return the text of an entry; ``seq``: its number. Half of a surrogate pair becomes "?"."""
    text = json.dumps({"seq": seq, **facts}, ensure_ascii=False, sort_keys=True, allow_nan=False)
    return text.encode(errors="replace").decode()


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
    """Of all of the others."""
    region: str = ""
    """Region whose log it is; empty: the control plane's."""

    @property
    def _signed(self) -> bytes:
        region = [self.region] if self.region else []
        return json.dumps([_FORMAT, self.seq, self.hash, self.at, self.public_key, *region]).encode()

    @classmethod
    def sign(cls, key: Ed25519PrivateKey, seq: int, hash_: str, at: float, region: str = "") -> Head:
        """Return a signed head."""
        head = cls(seq, hash_, at, public_key_of(key), region=region)
        return replace(head, signature=key.sign(head._signed).hex())

    @classmethod
    def read(cls, value: Any) -> Head:
        """Return a head that came from elsewhere. Raises ``AuditBroken`` unless its signature is its key's."""
        kinds: dict[str, Any] = {
            "seq": int, "hash": str, "at": (int, float), "public_key": str, "signature": str,
            "region": str,
        }  # fmt: skip
        names = [field.name for field in fields(cls)]
        value = {"region": "", **value} if isinstance(value, dict) else {}
        if set(value) != set(names):
            raise AuditBroken("it is no head of a log")
        if any(not isinstance(value[name], kinds[name]) or isinstance(value[name], bool) for name in names):
            raise AuditBroken("it is no head of a log")
        if not -_LATEST < value["at"] < _LATEST or not 0 <= value["seq"] < 1 << 63:
            raise AuditBroken("it is no head of a log: its time or number is none")
        head = cls(**{**value, "at": float(value["at"])})
        wrong = {len(head.hash), len(head.public_key)} != {_HASH_CHARACTERS} or len(head.region) > NAME_BYTES
        if wrong or len(head.signature) != _SIGNATURE_CHARACTERS:
            raise AuditBroken("it is no head of a log")
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(head.public_key))
            key.verify(bytes.fromhex(head.signature), head._signed)
        except (ValueError, InvalidSignature):
            raise AuditBroken(f"the signature of head {head.seq} is not of the key that it names") from None
        return head


def header_line(federation: str, region: str = "") -> str:
    """Return the first line of a file. ``region``: whose log it is; empty: the control plane's."""
    return json.dumps({"format": _FORMAT, "federation": federation, **({"region": region} if region else {})})


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
    region: str = ""
    """Region whose log it is; empty: the control plane's."""
    other_keys: int = 0
    """Number of heads of the region that another key has signed: it enrolled again, or its log was rewritten."""
    without_head: int = 0
    """Number of entries of witnesses that tell of a head which was none."""


@dataclass(frozen=True)
class Witness:
    """What somebody else has received of a log."""

    heads: tuple[Head, ...]
    federation: str = ""
    """Federation of the log in which the heads are; empty: they are in no log."""
    without_head: int = 0
    """Number of entries that tell of a head which was none."""


def verify(
    lines: Iterable[str],
    *,
    public_key: str = "",
    witnesses: Iterable[Head] = (),
    witness_files: Iterable[tuple[str, Iterable[str]]] = (),
    region: str = "",
) -> Verified:
    """Check a file of a log, which is read once.

    Args:
        lines: of the file, without their ends.
        public_key: the one that the head must be signed with; empty: the one that the file names.
        witnesses: heads that others have received earlier.
        witness_files: names and lines of files with such heads (`witness_of`); each must have one of this log.
        region: whose log it must be; empty: whoever's the file names.

    Raises ``AuditBroken`` at the first line that is not what was recorded; ``AnotherLog`` for another region's log, and
    for witnesses of another log.
    """
    found = _parsed(lines)
    header = next(found, (0, {}))[1]
    federation, named = bounded_texts(header.get("federation")), bounded_texts(header.get("region", ""))
    if header.get("format") != _FORMAT or not isinstance(federation, str) or not isinstance(named, str):
        raise AuditBroken(f"line 1: it is no audit log of format {_FORMAT}")
    if region and region != named:
        raise AnotherLog(f"it is the log of {_whose(named)}, not of {_whose(region)}")
    received, without_head = _received(witness_files, federation, named)
    heads = [*witnesses, *received]
    wanted = {one.seq for one in heads}
    hashes: dict[int, str] = {}
    before, seq, kinds, head = GENESIS, 0, Counter[str](), None
    for number, line in found:
        if head is not None:
            raise AuditBroken(f"line {number}: there is more after the head")
        if "head" in line:
            head = _checked_head(number, line, seq, before)
            _check_header(number, line, head, header["federation"])
            continue
        before, seq, facts = _next(number, line, before, seq)
        kinds[clean(str(facts["kind"]), NAME_BYTES)] += 1
        if seq in wanted:
            hashes[seq] = before
    if head is None:
        raise AuditBroken("the file ends before the head of the log")
    if public_key and head.public_key != public_key:
        raise AuditBroken(f"the head is signed with the key {head.public_key}, not {public_key}")
    if head.region != named:
        raise AuditBroken(f"the file says that it is the log of {_whose(named)}, its head {_whose(head.region)}")
    own = _compare(head, hashes, heads)
    last, others = max((one.seq for one in own), default=0), len(heads) - len(own)
    return Verified(federation, head, dict(kinds), len(own), last, named, others, without_head)


def _received(
    witness_files: Iterable[tuple[str, Iterable[str]]], federation: str, region: str
) -> tuple[list[Head], int]:
    """Return the heads of a log in files, and the number of entries there that tell of a head which was none."""
    heads: list[Head] = []
    without_head = 0
    for name, content in witness_files:
        try:
            witness = witness_of(content, region)
            _check_witness(witness, federation, region)
        except AuditBroken as error:
            raise type(error)(f"witness {name}: {error}") from None
        heads += witness.heads
        without_head += witness.without_head
    return heads, without_head


def witness_of(lines: Iterable[str], region: str) -> Witness:
    """Return what somebody has received of a log.

    Args:
        lines: of a file with one head on each line, or of the control plane's log, which has heads of regions.
        region: whose log the heads are of; empty: the control plane's.

    Raises ``AuditBroken`` at the first line that is neither, or that is not what the control plane has recorded.
    """
    heads: list[Head] = []
    federation, log_head, without = "", None, 0
    before, seq = GENESIS, 0
    for number, line in _parsed(lines):
        if number == 1 and line.get("format") == _FORMAT:
            federation = str(line.get("federation", ""))
            if not federation or line.get("region"):
                raise AnotherLog("line 1: it is not the log of a control plane")
        elif not federation:
            # When the region has received it, by its own clock.
            line.pop("received", None)
            heads.append(_head_in(number, line))
        elif log_head is not None:
            raise AuditBroken(f"line {number}: there is more after the head")
        elif "head" in line:
            log_head = _checked_head(number, line, seq, before)
            _check_header(number, line, log_head, federation)
        else:
            before, seq, facts = _next(number, line, before, seq)
            if facts["kind"] != "region.head" or facts.get("region") != region:
                continue
            if "head" in facts:
                heads.append(_head_in(number, facts["head"]))
            else:
                without += 1
    if federation and log_head is None:
        raise AuditBroken("the file ends before the head of the log")
    return Witness(tuple(one for one in heads if one.region == region), federation, without)


def _whose(region: str) -> str:
    return f"region {region}" if region else "the control plane"


def _check_witness(witness: Witness, federation: str, region: str) -> None:
    if witness.federation and witness.federation != federation:
        raise AnotherLog(f"it is of federation {witness.federation}, the log of {federation}")
    if not witness.heads:
        raise AnotherLog(f"it has no head of the log of {_whose(region)}, so that nothing is compared")


def _head_in(number: int, value: Any) -> Head:
    try:
        return Head.read(value)
    except AuditBroken as error:
        raise AuditBroken(f"line {number}: {error}") from None


def _compare(head: Head, hashes: dict[int, str], witnesses: list[Head]) -> list[Head]:
    """Compare a log with the heads that witnesses have; return those that its key has signed.

    ``hashes``: of its entries with their numbers. A region that has lost its state enrols with another key, and begins
    another log; the control plane's key stays.
    """
    own = [one for one in witnesses if one.public_key == head.public_key]
    foreign = next((one for one in witnesses if one.public_key != head.public_key), None)
    if foreign is not None and not (head.region and own):
        text = (
            f"a witness has a head that is signed with another key, {foreign.public_key}: either it is of another log"
        )
        raise AuditBroken(f"{text}, or this log was signed again with the key {head.public_key}")
    for one in own:
        if one.seq > head.seq:
            raise AuditBroken(
                f"entries {head.seq + 1} to {one.seq} are missing: a witness has received a head with them"
            )
        if one.seq and hashes[one.seq] != one.hash:
            raise AuditBroken(f"the log up to entry {one.seq} differs from what a witness has received")
    return own


def _next(number: int, line: Mapping[str, Any], before: str, seq: int) -> tuple[str, int, dict[str, Any]]:
    """Return hash, number and facts of the entry in a line, which must follow another one."""
    text, hashed = line.get("entry"), ""
    if isinstance(text, str):
        # What cannot be encoded was never recorded: half of a surrogate pair.
        with suppress(UnicodeEncodeError):
            hashed = hash_of(before, text)
    if not isinstance(text, str) or not hashed or line.get("hash") != hashed:
        raise AuditBroken(f"line {number}: entry {seq + 1} is not the one that was recorded here")
    return hashed, seq + 1, _facts(number, text, seq + 1)


def _parsed(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line) if len(line) <= _MAX_LINE else None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise AuditBroken(f"line {number}: it is no line of an audit log")
        yield number, value


def _checked_head(number: int, line: Mapping[str, Any], seq: int, hash_: str) -> Head:
    head = _head_in(number, line["head"])
    if (head.seq, head.hash) != (seq, hash_):
        raise AuditBroken(f"line {number}: the head is of entry {head.seq}, not of the last one, {seq}")
    return head


def _facts(number: int, text: str, seq: int) -> dict[str, Any]:
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or not {"seq", "kind"} <= facts.keys():
        raise AuditBroken(f"line {number}: it is no entry of an audit log")
    if facts["seq"] != seq:
        raise AuditBroken(f"line {number}: the entry has the number {clean(str(facts['seq']), 20)}, not {seq}")
    return facts


def _check_header(number: int, line: Mapping[str, Any], head: Head, federation: str) -> None:
    """Raise ``AuditBroken`` unless the key of a file's head has signed whose log the file says that it is."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(head.public_key))
        key.verify(bytes.fromhex(str(line.get("file", ""))), _file_text(head, federation))
    except (ValueError, InvalidSignature):
        raise AuditBroken(
            f"line {number}: the federation that line 1 names is not signed with the head's key"
        ) from None


def _file_text(head: Head, federation: str) -> bytes:
    return json.dumps([f"{_FORMAT} file", federation, head.region, head.seq, head.hash]).encode()


def head_line(head: Head, key: Ed25519PrivateKey, federation: str) -> str:
    """Return the last line of a file: the head, and a signature by its key of whose log the file says that it is."""
    return json.dumps({"head": asdict(head), "file": key.sign(_file_text(head, federation)).hex()})
