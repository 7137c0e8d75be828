"""Outgoing messages of an agent, made deliverable, so that no message blocks the ones after it."""

from __future__ import annotations

import structlog
from google.protobuf.message import DecodeError, Message

from geofed_pb.bounds import LOG_LINE_BYTES, NAME_BYTES, SESSION_MESSAGE_BYTES, TEXT_BYTES, clean
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import to_proto
from geofed_pb.v1 import agent_pb2
from region_agent.state.store import AgentStore

__all__ = ["ReportQueue", "fitted", "is_transient", "too_large"]

_log = structlog.get_logger("geofed.hub")
_MAX_REFUSALS = 3
"""Times that a session may end with a permanent error while only this report was being sent; then it is set aside."""

_MAX_ENTRIES = 1000
"""Entries of a list or a map that are kept in a message that is too large."""
_TRANSIENT = frozenset({"FENCED", "UNAUTHENTICATED", "FORBIDDEN", "CERTIFICATE_EXPIRED", "CERTIFICATE_INVALID"})
"""Errors that no message causes, besides retryable ones."""


def is_transient(error: GeofedError) -> bool:
    """Whether an error that has ended a session cannot be caused by a message."""
    return error.retryable or error.code in _TRANSIENT


def fitted(message: agent_pb2.FromAgent, max_bytes: int = SESSION_MESSAGE_BYTES) -> agent_pb2.FromAgent:
    """Return the message, with shortened texts and lists if it exceeds the limit.

    If that is not enough, return a message that reports the error instead.
    """
    if message.ByteSize() <= max_bytes:
        return message
    cut = agent_pb2.FromAgent.FromString(message.SerializeToString())
    _cut_texts(cut)
    if cut.ByteSize() <= max_bytes:
        return cut
    return _substitute(message, too_large(message, max_bytes))


def too_large(message: Message, max_bytes: int = SESSION_MESSAGE_BYTES) -> GeofedError:
    """Return the error for a message that exceeds the limit."""
    text = f"a message has {message.ByteSize():,} bytes, which exceeds the limit of {max_bytes:,}"
    return GeofedError("LIMIT_EXCEEDED", text)


def _read(raw: bytes) -> agent_pb2.FromAgent | GeofedError:
    """Decode a stored report; returns an error if it cannot be decoded."""
    try:
        return agent_pb2.FromAgent.FromString(raw)
    except DecodeError as error:
        return GeofedError("FRAME_INVALID", f"a stored report cannot be read: {error}")


def _substitute(message: agent_pb2.FromAgent | None, error: GeofedError) -> agent_pb2.FromAgent:
    """Return the message that is sent instead of an undeliverable report: its job has failed with the error."""
    kind = message.WhichOneof("body") if message is not None else None
    if message is None or kind not in ("partition", "happening", "profile"):
        text = f"{'log lines' if kind == 'logs' else 'a report'} could not be delivered: {error}"
        event = agent_pb2.Happening(kind="message.undeliverable", text=text)
        return agent_pb2.FromAgent(seq=message.seq if message is not None else 0, happening=event)
    if kind == "profile":
        profiled = agent_pb2.ProfileReport(id=message.profile.id, error=to_proto(error))
        return agent_pb2.FromAgent(seq=message.seq, profile=profiled)
    if kind == "happening":
        text = f"an event of kind {clean(message.happening.kind, 64)} could not be delivered: {error}"
        event = agent_pb2.Happening(
            job=message.happening.job, at=message.happening.at, kind="message.undeliverable", text=text
        )
        return agent_pb2.FromAgent(seq=message.seq, happening=event)
    report = message.partition
    failed = agent_pb2.PartitionReport(
        job=report.job, epoch=report.epoch, attempt=report.attempt, meter=report.meter, state="failed",
        condition=error.message, error=to_proto(error),
    )  # fmt: skip
    return agent_pb2.FromAgent(seq=message.seq, partition=failed)


class ReportQueue:
    """Stored reports that are sent to the control plane, in order.

    After a session has ended with an error that is not transient, reports are sent one by one, each after the previous
    one is acknowledged. A report with which sessions end repeatedly is set aside, and an error is sent in its place.
    """

    def __init__(self, store: AgentStore) -> None:
        self._store = store
        self._acknowledged = 0
        self._one_by_one = False
        self._alone = 0
        """Number of the last report that was sent on its own; 0: none."""
        self._refusals: dict[int, int] = {}
        """Sessions that have ended while a report was sent on its own, by its number."""

    def resume(self, cursor: int) -> bool:
        """Continue after the control plane's last report; see `AgentStore.resume_reports`."""
        self._acknowledged = cursor
        return self._store.resume_reports(cursor)

    def acknowledged(self, seq: int) -> None:
        """Delete reports up to this one, which the control plane has stored."""
        self._store.forget_reports(seq)
        self._acknowledged = max(self._acknowledged, seq)

    def after(self, cursor: int) -> list[tuple[int, bytes]]:
        """Return the reports to send now. ``cursor``: the last one that was sent in this session."""
        if not self._one_by_one:
            return self._store.reports_after(cursor)
        if cursor > self._acknowledged:
            return []
        batch = self._store.reports_after(cursor, 1)
        self._one_by_one, self._alone = bool(batch), batch[0][0] if batch else 0
        return batch

    def sendable(self, seq: int, raw: bytes) -> agent_pb2.FromAgent:
        """Return a stored report as it is sent, also if an earlier version of the agent has stored one that is too
        large."""
        message = _read(raw)
        if isinstance(message, GeofedError):
            message = self._set_aside(seq, None, message)
        elif message.ByteSize() > SESSION_MESSAGE_BYTES:
            _log.warning("a report is cut", seq=seq, error=too_large(message).message)
            message = fitted(message)
        message.seq = seq
        return message

    def broke(self, error: GeofedError) -> None:
        """Handle a session that has ended with an error that is not transient."""
        suspect, self._alone = self._alone, 0
        if not self._one_by_one:
            self._one_by_one = self._store.reports_waiting() > 0
            return
        if suspect <= self._acknowledged:
            return
        self._refusals[suspect] = self._refusals.get(suspect, 0) + 1
        if self._refusals[suspect] < _MAX_REFUSALS:
            return
        del self._refusals[suspect]
        for seq, raw in self._store.reports_after(suspect - 1, 1):
            read = _read(raw)
            message = read if isinstance(read, agent_pb2.FromAgent) else None
            self._set_aside(
                seq, message, GeofedError("FRAME_INVALID", f"the control plane does not accept it: {error}")
            )

    def _set_aside(self, seq: int, message: agent_pb2.FromAgent | None, error: GeofedError) -> agent_pb2.FromAgent:
        """Set a report aside; returns the message that is sent in its place."""
        _log.error("a report is set aside", seq=seq, error=str(error))
        substitute = _substitute(message, error)
        self._store.set_report_aside(seq, str(error), substitute.SerializeToString())
        return substitute


def _cut_texts(message: Message) -> None:
    """Shorten every text to its limit, and every list and map to its first entries."""
    limit = LOG_LINE_BYTES if isinstance(message, agent_pb2.LogRecord) else TEXT_BYTES
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            few = sorted(value)[:_MAX_ENTRIES]
            kept = {clean(key, NAME_BYTES) if isinstance(key, str) else key: value[key] for key in few}
            message.ClearField(field.name)
            getattr(message, field.name).update(kept)
        elif field.is_repeated:
            del value[_MAX_ENTRIES:]
            for index, item in enumerate(value):
                if isinstance(item, Message):
                    _cut_texts(item)
                elif isinstance(item, str):
                    value[index] = clean(item, limit)
        elif isinstance(value, Message):
            _cut_texts(value)
        elif isinstance(value, str):
            setattr(message, field.name, clean(value, limit))
