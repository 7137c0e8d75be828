"""The audit log of the control plane: its key, its signed heads, and the regions that witness them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from control_plane.store import AuditRow, Store
from geofed_pb.security.audit import GENESIS, Head
from geofed_pb.v1 import agent_pb2

__all__ = ["AuditLog"]


class AuditLog:
    """What is known of the stored log, without its entries."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.key = Ed25519PrivateKey.generate()
        """Signs the heads; the server sets the federation's own."""
        self._clock = clock
        self._last = AuditRow("", 0, GENESIS)
        self._told: tuple[AuditRow, agent_pb2.ToAgent] | None = None
        """The entry of which a head was last made for agents, and that message."""

    def load(self, store: Store) -> None:
        """Look up the last entry."""
        self._last = store.last_audit() or self._last

    def appended(self, row: AuditRow) -> None:
        """Note the last stored entry."""
        self._last = row

    def head(self, row: AuditRow | None = None) -> Head:
        """Return a signed head: of an entry, or of the last one."""
        row = row or self._last
        return Head.sign(self.key, row.seq, row.hash, self._clock())

    def message(self) -> agent_pb2.ToAgent:
        """Return the last head for an agent, which keeps it: the log can then no longer be rewritten unnoticed.

        It is signed once for each entry, since all agents that connect get one.
        """
        if self._told is None or self._told[0] is not self._last:
            head = agent_pb2.AuditHead(**asdict(self.head()))
            self._told = self._last, agent_pb2.ToAgent(audit_head=head)
        return self._told[1]
