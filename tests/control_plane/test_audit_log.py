"""What goes into the audit log: bounded, and before what it tells of is done."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from control_plane.service.state._draft import Draft
from control_plane.service.state._federation import Federation
from geofed_pb.errors import GeofedError
from geofed_pb.security.audit import AuditBroken, Head, entry_line, hash_of, head_line, header_line, verify
from tests.proto.test_audit import KEY


def test_an_entry_can_be_read_again_however_much_a_job_has_measured() -> None:
    draft = Draft(1.0, {}, {})
    metrics = {f"{number}{chr(34) * 190}": 0.5 for number in range(2000)}
    draft.audit("job.ended", job="j", metrics=metrics, error="x" * 100_000, usd=1.0)
    draft.record("job.deleted", "", data={"job": "gone", "user": "ann", "seq": 7, "kind": "other", "at": 0})
    entry, deleted = draft.audits
    assert deleted == {"at": 1.0, "kind": "job.deleted", "job": "gone", "user": "ann"}
    assert entry["usd"] == 1.0
    assert entry["metrics"].keys() == {"sha256", "bytes"}
    text = json.dumps({**entry, "seq": 1})
    lines = [header_line("f"), entry_line(text, hash_of("0" * 64, text))]
    head = Head.sign(KEY, 1, hash_of("0" * 64, text), 1.0)
    assert verify([*lines, head_line(head, KEY, "f")]).head == head
    with pytest.raises(AuditBroken):
        verify(lines)


def test_what_cannot_be_recorded_is_not_read() -> None:
    class Full:
        clock = staticmethod(lambda: 5.0)

        def __init__(self) -> None:
            self._noted_reads: dict[Any, float] = {}

        @asynccontextmanager
        async def change(self) -> Any:
            yield Draft(5.0, {}, {})
            raise GeofedError("DISK_FULL", "no space")

    async def read() -> None:
        entry, full = SimpleNamespace(row=SimpleNamespace(id="j")), Full()
        for _ in range(2):
            with pytest.raises(GeofedError, match="no space"):
                await Federation.note_read(full, entry, "ann", "sha256:1")  # type: ignore[arg-type]

    asyncio.run(read())
