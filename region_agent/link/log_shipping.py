"""Sends log lines of jobs to the control plane, with bounded memory and a bounded queue of reports."""

from __future__ import annotations

import time
from collections.abc import Callable

from geofed_pb.bounds import LOG_LINE_BYTES, clean, parts_of
from geofed_pb.v1 import agent_pb2
from region_agent.link.line_buffer import LineBuffer, dropped_text
from region_agent.state.store import AgentStore

__all__ = ["LogShipping"]

_JOB_BYTES = 1 << 20
"""Most bytes of one job's lines that are buffered."""
_BATCH_BYTES = 256 << 10
"""Most bytes of lines in a message."""
_BATCH_LINES = 5000
"""Most lines in a message."""
_QUEUE_BYTES = 4 << 20
"""Bytes of stored reports up to which lines are sent. With more, lines stay in the buffer, which drops the middle
ones."""


class LogShipping:
    """Buffers log lines and sends them in batches."""

    def __init__(self, store: AgentStore, send: Callable[[agent_pb2.FromAgent], None]) -> None:
        """``send`` stores a message, to be sent in order."""
        self._store, self._send = store, send
        self._waiting: dict[str, LineBuffer[agent_pb2.LogRecord]] = {}

    def add(self, job: str, source: str, text: str) -> None:
        """Add a line to a job's log."""
        text = clean(text, LOG_LINE_BYTES)
        record = agent_pb2.LogRecord(job=job, at=time.time(), source=clean(source, 64), text=text)
        self._waiting.setdefault(job, LineBuffer(_JOB_BYTES)).add(record, record.ByteSize())

    def flush(self) -> None:
        """Send the buffered lines of all jobs, unless too many reports are waiting."""
        if self._waiting and self._store.report_bytes_waiting() <= _QUEUE_BYTES:
            for job in list(self._waiting):
                self.flush_job(job)

    def flush_job(self, job: str) -> None:
        """Send the buffered lines of a job in any case, before a report that they explain."""
        buffer = self._waiting.pop(job, None)
        if buffer is None:
            return
        first, dropped, newest = buffer.take()
        if dropped:
            text = dropped_text(dropped)
            first.append(agent_pb2.LogRecord(job=job, at=newest[0].at, source="agent", text=text))
        for batch in parts_of([*first, *newest], agent_pb2.LogRecord.ByteSize, _BATCH_BYTES, _BATCH_LINES):
            self._send(agent_pb2.FromAgent(logs=agent_pb2.LogBatch(records=batch)))
