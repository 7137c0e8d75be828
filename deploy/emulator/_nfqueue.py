"""Client of the kernel's packet queues (NFQUEUE), over netlink: it receives metadata of packets and sends verdicts.

A packet that a rule sends to a queue stays in the kernel; user space gets its id and sends a verdict at any later time.
Payloads are never copied, and a batch verdict releases every packet up to an id in order.
Layouts follow the kernel's user interface headers ``linux/netfilter/nfnetlink_queue.h`` and
``linux/netfilter_ipv4/ip_tables.h``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Mapping

_NETLINK_NETFILTER = 12
"""Netlink protocol of netfilter, as of `linux/netlink.h`."""
_SUBSYSTEM_QUEUE = 3
"""Subsystem NFNL_SUBSYS_QUEUE, as of `linux/netfilter/nfnetlink.h`."""
_PACKET, _VERDICT, _CONFIG, _VERDICT_BATCH = (_SUBSYSTEM_QUEUE << 8 | n for n in range(4))
_REQUEST, _REQUEST_ACK = 1, 5
_NLMSG_ERROR = 2
"""Type of netlink messages that acknowledge or report an error, as of `linux/netlink.h`."""
_CFG_CMD, _CFG_PARAMS, _CFG_QUEUE_MAXLEN, _CFG_MASK, _CFG_FLAGS = range(1, 6)
_CMD_BIND = 1
"""Command NFQNL_CFG_CMD_BIND, as of `linux/netfilter/nfnetlink_queue.h`."""
_COPY_META = 1
"""Mode NFQNL_COPY_META: only metadata of packets is copied to user space, as of `linux/netfilter/nfnetlink_queue.h`."""
_FLAG_GSO = 1 << 2
"""Flag NFQA_CFG_F_GSO: segments are queued whole, as of `linux/netfilter/nfnetlink_queue.h`."""
_ATTR_VERDICT = 2
"""Attribute NFQA_VERDICT_HDR, as of `linux/netfilter/nfnetlink_queue.h`."""
_DROP, _ACCEPT = 0, 1
_SO_RCVBUFFORCE = 33
"""Socket option that sets the receive buffer beyond the system's limit, as of `asm-generic/socket.h`; Python does not
name it."""
_SOL_NETLINK, _NETLINK_NO_ENOBUFS = 270, 5

# nlmsghdr (len, type, flags, seq, pid), nfgenmsg (family, version, queue), one attribute (len, type, ...)
_HEADER = struct.Struct("=IHHII")
_VERDICT_MESSAGE = struct.Struct("=IHHIIBB2sHH4s4s")
_ID_OFFSET = 24
"""Offset in bytes of the packet's number in a queued packet's message: netlink header (16), nfgenmsg (4), attribute
header (4)."""
_QUEUED_PACKETS = 400_000
"""Most packets that a queue holds."""


class PacketQueue:
    """One kernel packet queue. Owned by one thread; not safe to share."""

    def __init__(self, number: int, *, whole_segments: bool) -> None:
        """Bind queue ``number`` of the calling thread's network namespace. Raises OSError.

        ``whole_segments`` False: the kernel cuts large TCP segments into packets before they are queued.
        """
        self._number = number.to_bytes(2, "big")
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 8 << 20)
        except PermissionError:  # in a user namespace the host's limit holds
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_NO_ENOBUFS, 1)
        self._buffer = bytearray(4096)
        try:
            self._configure(_CFG_CMD, struct.pack(">BBH", _CMD_BIND, 0, socket.AF_INET))
            self._configure(_CFG_PARAMS, struct.pack(">IB", 0, _COPY_META))
            self._configure(_CFG_QUEUE_MAXLEN, struct.pack(">I", _QUEUED_PACKETS))
            self.set_whole_segments(whole_segments)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor of the netlink socket, for `select`."""
        return self._socket.fileno()

    def receive(self) -> int | None:
        """Return the id of the next packet; None: no packet is waiting."""
        while True:
            try:
                self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return None
            if self._buffer[4] | self._buffer[5] << 8 == _PACKET:
                return int.from_bytes(self._buffer[_ID_OFFSET : _ID_OFFSET + 4], "big")

    def accept_up_to(self, packet: int) -> None:
        """Release every queued packet up to this id, in order."""
        self._verdict(_VERDICT_BATCH, _ACCEPT, packet)

    def accept(self, packet: int) -> None:
        """Let a packet pass."""
        self._verdict(_VERDICT, _ACCEPT, packet)

    def drop(self, packet: int) -> None:
        """Discard a packet."""
        self._verdict(_VERDICT, _DROP, packet)

    def close(self) -> None:
        """Unbind; the kernel drops the packets that are still waiting."""
        self._socket.close()

    def set_whole_segments(self, whole_segments: bool) -> None:
        """Queue large TCP segments whole, or let the kernel cut them into packets before they are queued."""
        flags = struct.pack(">I", _FLAG_GSO if whole_segments else 0)
        mask = struct.pack(">I", _FLAG_GSO)
        # without an acknowledgement, which might come after packets in the receive buffer
        self._send_config(_attribute(_CFG_FLAGS, flags) + _attribute(_CFG_MASK, mask), _REQUEST)

    def _verdict(self, kind: int, verdict: int, packet: int) -> None:
        self._socket.send(
            _VERDICT_MESSAGE.pack(
                _VERDICT_MESSAGE.size,
                kind,
                _REQUEST,
                0,
                0,
                0,
                0,
                self._number,
                12,
                _ATTR_VERDICT,
                verdict.to_bytes(4, "big"),
                packet.to_bytes(4, "big"),
            )
        )

    def _configure(self, attribute: int, payload: bytes) -> None:
        self._send_config(_attribute(attribute, payload), _REQUEST_ACK)
        answer = self._socket.recv(4096)
        if _HEADER.unpack_from(answer)[1] == _NLMSG_ERROR:
            code = -struct.unpack_from("=i", answer, _HEADER.size)[0]
            if code:
                raise OSError(code, f"NFQUEUE: {os.strerror(code)}")

    def _send_config(self, attributes: bytes, flags: int) -> None:
        body = b"\0\0" + self._number + attributes
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), _CONFIG, flags, 1, 0) + body)


def _attribute(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


_IPT_SO_SET_REPLACE = 64
"""Socket option that replaces a table of rules, as of `linux/netfilter_ipv4/ip_tables.h`."""
_IPT_SO_GET_INFO = 64
"""Socket option that reads the size of a table of rules, as of `linux/netfilter_ipv4/ip_tables.h`."""
_LOCAL_IN, _FORWARD, _LOCAL_OUT = 1, 2, 3
_ENTRY_BYTES = 112
"""Size of `struct ipt_entry` without matches and target, as of `linux/netfilter_ipv4/ip_tables.h`."""
_COUNTERS_BYTES = 16
"""Size of `struct xt_counters`: packets and bytes, 64 bits each."""


def send_to_queues(queues: Mapping[tuple[str, str], int]) -> None:
    """Replace the filter table of the calling thread's namespace: forwarded packets of (source address,
    destination address) go to the queue with this number, all others pass.

    A packet is dropped if no process serves its queue, so the links of a dead relay are cut, but never unshaped.
    The table is written through the kernel's own interface, so that no packet-filter tool is needed.
    Raises OSError where the kernel has no such tables.
    """
    accept = _entry("0.0.0.0", "0.0.0.0", _target(b"", struct.pack("=iI", -2, 0)))
    rules = [_entry(src, dst, _target(b"NFQUEUE", struct.pack("=H6x", n))) for (src, dst), n in queues.items()]
    error = _entry("0.0.0.0", "0.0.0.0", _target(b"ERROR", b"ERROR".ljust(32, b"\0")))
    entries = [accept, *rules, accept, accept, error]
    offsets = [sum(len(e) for e in entries[:i]) for i in range(len(entries))]
    forward, forward_policy, output = offsets[1], offsets[1 + len(rules)], offsets[2 + len(rules)]
    hooks = [0, 0, forward, output, 0]
    underflows = [0, 0, forward_policy, output, 0]
    blob = b"".join(entries)
    valid = 1 << _LOCAL_IN | 1 << _FORWARD | 1 << _LOCAL_OUT
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as control:
        info = _table_info(control)
        old_count = struct.unpack_from("=I", info, 32 + 4 + 20 + 20)[0]
        old_counters = ctypes.create_string_buffer(old_count * _COUNTERS_BYTES)
        header = struct.pack(
            "=32s3I5I5IIQ",
            b"filter",
            valid,
            len(entries),
            len(blob),
            *hooks,
            *underflows,
            old_count,
            ctypes.addressof(old_counters),
        )
        control.setsockopt(socket.SOL_IP, _IPT_SO_SET_REPLACE, header + blob)


def _table_info(control: socket.socket) -> bytes:
    # the socket module cannot pass a filled buffer to getsockopt
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(b"filter", 84)
    size = ctypes.c_uint32(84)
    if libc.getsockopt(control.fileno(), socket.SOL_IP, _IPT_SO_GET_INFO, buffer, ctypes.byref(size)):
        code = ctypes.get_errno()
        what = "the kernel has no iptables filter table" if code == errno.ENOPROTOOPT else os.strerror(code)
        raise OSError(code, what)
    return buffer.raw


def _entry(src: str, dst: str, target: bytes) -> bytes:
    any_address = "0.0.0.0"
    masks = [b"\0" * 4 if a == any_address else b"\xff" * 4 for a in (src, dst)]
    ip = socket.inet_aton(src) + socket.inet_aton(dst) + masks[0] + masks[1] + b"\0" * 68
    sizes = struct.pack("=IHHI", 0, _ENTRY_BYTES, _ENTRY_BYTES + len(target), 0)
    return ip + sizes + b"\0" * _COUNTERS_BYTES + target


def _target(name: bytes, payload: bytes) -> bytes:
    return struct.pack("=H29sB", 32 + len(payload), name, 0) + payload
