"""What an agent sends, made so that it can be sent: no message may keep those behind it from the control plane."""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError, Message

from geofed_pb.bounds import LOG_LINE_BYTES, NAME_BYTES, SESSION_MESSAGE_BYTES, TEXT_BYTES, clean
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import to_proto
from geofed_pb.v1 import agent_pb2
from region_agent.state.store import AgentStore

__all__ = ["ReportQueue", "fitted", "is_passing", "too_large"]

_log = logging.getLogger("geofed.hub")
_MOST_REFUSALS = 3
"""A report that was alone under way so many times when a session broke, for no passing reason, is not sent again."""

_MOST_ENTRIES = 1000
"""Of a list or a map in a message that is too large."""
_PASSING = frozenset({"FENCED", "UNAUTHENTICATED", "FORBIDDEN", "CERTIFICATE_EXPIRED", "CERTIFICATE_INVALID"})
"""Of these, and of those that a later try may mend, no message is the cause."""


def is_passing(error: GeofedError) -> bool:
    """Whether what broke a session says nothing about the messages that were in it."""
    return error.retryable or error.code in _PASSING


def fitted(message: agent_pb2.FromAgent, most_bytes: int = SESSION_MESSAGE_BYTES) -> agent_pb2.FromAgent:
    """The message, which is cut visibly where it has more bytes, and gives way to what says so where that is not
    enough."""
    if message.ByteSize() <= most_bytes:
        return message
    cut = agent_pb2.FromAgent.FromString(message.SerializeToString())
    _cut_texts(cut)
    if cut.ByteSize() <= most_bytes:
        return cut
    return _substitute(message, too_large(message, most_bytes))


def too_large(message: Message, most_bytes: int = SESSION_MESSAGE_BYTES) -> GeofedError:
    """Why such a message is not sent."""
    return GeofedError("LIMIT_EXCEEDED", f"a message has {message.ByteSize():,} bytes; {most_bytes:,} at most are sent")


def _read(raw: bytes) -> agent_pb2.FromAgent | GeofedError:
    """A report as it was kept; an error where it cannot be read any more."""
    try:
        return agent_pb2.FromAgent.FromString(raw)
    except DecodeError as error:
        return GeofedError("FRAME_INVALID", f"a stored report cannot be read: {error}")


def _substitute(message: agent_pb2.FromAgent | None, error: GeofedError) -> agent_pb2.FromAgent:
    """What the control plane is told instead of a report that it cannot be given: its job has failed with that."""
    kind = message.WhichOneof("body") if message is not None else None
    if message is None or kind not in ("partition", "happening", "profile"):
        text = f"{'log lines' if kind == 'logs' else 'a report'} could not be delivered: {error}"
        told = agent_pb2.Happening(kind="message.undeliverable", text=text)
        return agent_pb2.FromAgent(seq=message.seq if message is not None else 0, happening=told)
    if kind == "profile":
        profiled = agent_pb2.ProfileReport(id=message.profile.id, error=to_proto(error))
        return agent_pb2.FromAgent(seq=message.seq, profile=profiled)
    if kind == "happening":
        text = f"an event of kind {clean(message.happening.kind, 64)} could not be delivered: {error}"
        told = agent_pb2.Happening(
            job=message.happening.job, at=message.happening.at, kind="message.undeliverable", text=text
        )
        return agent_pb2.FromAgent(seq=message.seq, happening=told)
    report = message.partition
    failed = agent_pb2.PartitionReport(
        job=report.job, epoch=report.epoch, attempt=report.attempt, meter=report.meter, state="failed",
        condition=error.message, error=to_proto(error),
    )  # fmt: skip
    return agent_pb2.FromAgent(seq=message.seq, partition=failed)


class ReportQueue:
    """The durable reports on their way to the control plane, in order.

    Where a session breaks for no passing reason, they go one by one, each once the one before is acknowledged: one with
    which sessions break again and again is set aside, and the control plane is told so in its place.
    """

    def __init__(self, store: AgentStore) -> None:
        self._store = store
        self._acknowledged = 0
        self._one_by_one = False
        self._alone = 0
        """The report that was sent last, one by one."""
        self._refusals: dict[int, int] = {}

    def resume(self, cursor: int) -> bool:
        """See `AgentStore.resume_reports`."""
        self._acknowledged = cursor
        return self._store.resume_reports(cursor)

    def acknowledged(self, seq: int) -> None:
        """The control plane has reports up to this one."""
        self._store.forget_reports(seq)
        self._acknowledged = max(self._acknowledged, seq)

    def after(self, cursor: int) -> list[tuple[int, bytes]]:
        """What is to be sent now; ``cursor``: the last one that was sent in this session."""
        if not self._one_by_one:
            return self._store.reports_after(cursor)
        if cursor > self._acknowledged:
            return []
        batch = self._store.reports_after(cursor, 1)
        self._one_by_one, self._alone = bool(batch), batch[0][0] if batch else 0
        return batch

    def sendable(self, seq: int, raw: bytes) -> agent_pb2.FromAgent:
        """A report as it is sent, also where an earlier version of the agent has stored one that cannot be."""
        message = _read(raw)
        if isinstance(message, GeofedError):
            message = self._set_aside(seq, None, message)
        elif message.ByteSize() > SESSION_MESSAGE_BYTES:
            _log.warning("report %d is cut: %s", seq, too_large(message).message)
            message = fitted(message)
        message.seq = seq
        return message

    def broke(self, error: GeofedError) -> None:
        """A session has ended with an error that is not passing."""
        suspect, self._alone = self._alone, 0
        if not self._one_by_one:
            self._one_by_one = self._store.reports_waiting() > 0
            return
        if suspect <= self._acknowledged:
            return
        self._refusals[suspect] = self._refusals.get(suspect, 0) + 1
        if self._refusals[suspect] < _MOST_REFUSALS:
            return
        del self._refusals[suspect]
        for seq, raw in self._store.reports_after(suspect - 1, 1):
            read = _read(raw)
            told = read if isinstance(read, agent_pb2.FromAgent) else None
            self._set_aside(seq, told, GeofedError("FRAME_INVALID", f"the control plane does not take it: {error}"))

    def _set_aside(self, seq: int, message: agent_pb2.FromAgent | None, error: GeofedError) -> agent_pb2.FromAgent:
        """What is sent in its place."""
        _log.error("report %d is set aside: %s", seq, error)
        instead = _substitute(message, error)
        self._store.set_report_aside(seq, str(error), instead.SerializeToString())
        return instead


def _cut_texts(message: Message) -> None:
    """Every text to what one may have, every list and map to its first entries."""
    limit = LOG_LINE_BYTES if isinstance(message, agent_pb2.LogRecord) else TEXT_BYTES
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            few = sorted(value)[:_MOST_ENTRIES]
            kept = {clean(key, NAME_BYTES) if isinstance(key, str) else key: value[key] for key in few}
            message.ClearField(field.name)
            getattr(message, field.name).update(kept)
        elif field.is_repeated:
            del value[_MOST_ENTRIES:]
            for index, item in enumerate(value):
                if isinstance(item, Message):
                    _cut_texts(item)
                elif isinstance(item, str):
                    value[index] = clean(item, limit)
        elif isinstance(value, Message):
            _cut_texts(value)
        elif isinstance(value, str):
            setattr(message, field.name, clean(value, limit))
