"""Ranges, the file that an update lands in, the number of streams, and the frames."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_disk import small_disk

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import sync_pb2
from sync.tcp_streams.outgoing import Transfer
from sync.tcp_streams.partial_file import PartialFile
from sync.tcp_streams.ranges import Ranges, pieces
from sync.tcp_streams.sockets import TcpInfo, Tls, buffer_bytes, dial, tcp_info
from sync.tcp_streams.stream import FrameStream
from sync.tcp_streams.stream_count import KernelStatistics, StreamCount, chunk_bytes, largest_chunk_bytes
from sync.tcp_streams.wire import HEAD_BYTES, FrameHead, FrameKind, frame, parse

_STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(0, 60)), max_size=30)


@given(_STEPS)
def test_ranges_are_the_set_of_bytes_that_was_added_and_not_removed(steps: list[tuple[bool, int, int]]) -> None:
    ranges, truth = Ranges(), set[int]()
    for add, first, last in steps:
        begin, end = min(first, last), max(first, last)
        if add:
            ranges.add(begin, end)
            truth |= set(range(begin, end))
        else:
            ranges.remove(begin, end)
            truth -= set(range(begin, end))
    found = list(ranges)
    assert {byte for begin, end in found for byte in range(begin, end)} == truth
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))
    assert ranges.total == len(truth)
    assert {byte for begin, end in ranges.missing(10, 50) for byte in range(begin, end)} == set(range(10, 50)) - truth
    cut = list(pieces(ranges.missing(0, 60), 7))
    assert all(length <= 7 for _, length in cut)
    assert sum(length for _, length in cut) == 60 - len(truth & set(range(60)))


def test_what_was_just_written_is_hashed_without_being_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, read, real = bytes(range(256)) * 8, [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: read.append(given[2]) or real(*given))
    landing = PartialFile(tmp_path / "1.part", len(data))
    landing.write(0, data[:1000])
    landing.hash_and_flush(0, data[:1000])
    landing.write(1500, data[1500:])
    landing.hash_and_flush(1500, data[1500:])
    assert not read
    landing.write(1000, data[1000:1500])
    landing.hash_and_flush(1000, data[1000:1500])
    assert read == [1500]
    assert landing.digest() == "sha256:" + hashlib.sha256(data).hexdigest()


def test_a_landing_is_resumed_in_another_life_wherever_it_was_written(tmp_path: Path) -> None:
    data = bytes(range(256)) * 8
    first = PartialFile(tmp_path / "1.part", len(data))
    first.write(1000, data[1000:1500])
    first.write(0, data[:100])
    first.write_record()
    second = PartialFile(tmp_path / "1.part", len(data))
    assert second.have == [(0, 100), (1000, 1500)]
    assert second.prefix == 100
    second.write(100, data[100:1000])
    second.hash_and_flush()
    second.write(1500, data[1500:])
    assert second.whole
    assert second.digest() == "sha256:" + hashlib.sha256(data).hexdigest()


def test_the_record_of_a_file_that_has_its_last_name_tells_nothing_of_a_new_one(tmp_path: Path) -> None:
    whole = PartialFile(tmp_path / "1.part", 1000)
    whole.write(0, bytes(1000))
    whole.write_record()
    # The process died between giving the file its name and forgetting the record, and again as it kept one.
    (tmp_path / "1.part").rename(tmp_path / "1.frame")
    again = PartialFile(tmp_path / "1.part", 1000)
    assert again.have == []
    again.write(0, bytes(100))
    assert PartialFile(tmp_path / "1.part", 1000).have == []
    again.write_record()
    assert PartialFile(tmp_path / "1.part", 1000).have == [(0, 100)]


def test_damaged_bytes_are_hashed_again_once_they_are_here_again(tmp_path: Path) -> None:
    data = bytes(1000)
    landing = PartialFile(tmp_path / "1.part", 1000)
    landing.write(0, data[:200] + b"x" * 300 + data[500:])
    landing.hash_and_flush()
    landing.drop(200, 300)
    assert landing.have == [(0, 200), (500, 1000)]
    assert not landing.write(0, data), "some of it was there"
    assert landing.digest() == "sha256:" + hashlib.sha256(data).hexdigest()


def test_a_sender_cannot_change_what_it_has_sent(tmp_path: Path) -> None:
    data = bytes(range(250)) * 4
    landing = PartialFile(tmp_path / "1.part", 1000)
    assert landing.write(100, data[100:600])
    landing.hash_and_flush(100, data[100:600])
    # A relay that has sent what the digest is of, and then something else.
    assert not landing.write(0, bytes(700))
    landing.hash_and_flush()
    assert not landing.write(100, b"x" * 500)
    assert landing.write(700, data[700:])
    content = bytes(100) + data[100:600] + bytes(100) + data[700:]
    assert (tmp_path / "1.part").read_bytes() == content
    assert landing.digest() == "sha256:" + hashlib.sha256(content).hexdigest()


@pytest.mark.timeout(10)
def test_a_stream_that_ends_before_a_piece_writes_nothing(tmp_path: Path) -> None:
    landing = PartialFile(tmp_path / "1.part", 100)
    landing.write(0, bytes(50))
    landing.write(50, b"")
    landing.write(20, b"")
    assert landing.have == [(0, 50)]


def test_of_two_senders_of_the_same_bytes_one_writes_them(tmp_path: Path) -> None:
    """Whatever the threads' order, the digest is that of the file."""
    for number in range(20):
        landing = PartialFile(tmp_path / f"{number}.part", 64 << 10)

        def send(byte: bytes, landing: PartialFile = landing) -> int:
            new = 0
            for at in range(0, 64 << 10, 1 << 10):
                piece = byte * (1 << 10)
                wrote = landing.write(at, piece)
                landing.hash_and_flush(at, piece if wrote else b"")
                new += wrote
            return new

        with ThreadPoolExecutor(3) as pool:
            assert sum(pool.map(send, (b"a", b"b", b"c"))) == 64
        content = (tmp_path / f"{number}.part").read_bytes()
        assert landing.digest() == "sha256:" + hashlib.sha256(content).hexdigest()
        landing.close()


def test_a_write_that_fails_leaves_room_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    landing = PartialFile(tmp_path / "1.part", 100)
    landing.write(40, bytes(10))
    real = os.pwrite

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(GeofedError) as raised:
        landing.write(0, bytes(100))
    assert raised.value.code == "DISK_FULL"
    monkeypatch.setattr(os, "pwrite", real)
    landing.write(0, bytes(100))
    assert landing.whole


def test_nobody_writes_into_a_landing_that_is_complete(tmp_path: Path) -> None:
    landing = PartialFile(tmp_path / "1.part", 10)
    landing.write(0, bytes(10))
    landing.seal()
    with pytest.raises(GeofedError) as raised:
        landing.write(0, b"x")
    assert raised.value.code == "FENCED"
    landing.discard()
    landing.write(0, b"x")
    assert landing.have == [(0, 1)]


@pytest.mark.processes
def test_the_room_for_an_update_is_taken_at_its_beginning(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", bytes_=1 << 16) as folder:
        landing = PartialFile(folder / "1.part", 1 << 20)
        with pytest.raises(GeofedError) as raised:
            landing.write(0, b"first")
        assert raised.value.code == "DISK_FULL"
        assert not list(folder.iterdir()), "the room is free again"
        del landing


def _held(streams: StreamCount, *rates: float, seconds: float = 2.0) -> None:
    """Updates that the other side's window holds back."""
    for mbps in rates:
        streams.observe(KernelStatistics(10_000, 0, False, busy_seconds=2.0, limited_seconds=1.5))
        streams.add_goodput(mbps, seconds, streams.count)


def test_streams_that_a_window_holds_back_are_doubled_while_that_pays() -> None:
    streams = StreamCount()
    streams.set_rtt(0.03)
    _held(streams, 60, 100)
    assert streams.count == 4
    _held(streams, 150, 190)
    assert streams.count == 8
    _held(streams, 200, 195)
    assert streams.count == 4, "eight were no better than four"
    _held(streams, 900, 900)
    assert streams.count == 4, "settled"
    streams.set_rtt(0.032)
    assert streams.count == 4
    streams.set_rtt(0.2)
    _held(streams, 100, 100, 200, 200)
    assert streams.count == 16, "another path is explored again"


def test_streams_that_nothing_holds_back_stay_as_they_are() -> None:
    streams = StreamCount()
    streams.set_rtt(0.15)
    for mbps in (100, 200, 300, 400):
        streams.observe(KernelStatistics(10_000, 0, True, busy_seconds=2.0, limited_seconds=0.5))
        streams.add_goodput(mbps, 2.0, streams.count)
    assert streams.count == 4


def test_a_path_that_loses_packets_without_a_queue_gets_eight_streams_at_once() -> None:
    streams = StreamCount()
    streams.set_rtt(0.15)
    for _ in range(4):
        assert streams.count == 4
        streams.observe(KernelStatistics(segments=5000, resent=5))
    assert streams.count == 8
    streams.set_rtt(0.3)
    assert streams.count == 4, "another path may lose nothing"


@pytest.mark.parametrize(
    "look",
    [
        KernelStatistics(segments=5000, resent=5, queued=True),
        KernelStatistics(segments=5000, resent=400),
        KernelStatistics(segments=50_000, resent=1),
        KernelStatistics(segments=5000),
    ],
    ids=["queue is full", "burst", "hardly any", "none"],
)
def test_other_losses_are_no_reason_for_more_streams(look: KernelStatistics) -> None:
    streams = StreamCount()
    streams.set_rtt(0.15)
    for _ in range(20):
        streams.observe(look)
    assert streams.count == 4


def _view(segments: int, rtt_seconds: float = 0.1, window_seconds: float = 0.0, buffer_seconds: float = 0.0) -> TcpInfo:
    return TcpInfo(rtt_seconds, 0.1, segments, segments // 100, segments / 1000, window_seconds, buffer_seconds, 1000)


def test_a_look_sums_what_streams_have_seen_since_the_last_one() -> None:
    look = KernelStatistics()
    look.add(_view(1000), _view(3000, window_seconds=0.5), 1000)
    look.add(_view(0), _view(1000, buffer_seconds=0.5), 1000)
    assert (look.segments, look.resent, look.queued) == (3000, 30, False)
    assert (look.busy_seconds, look.limited_seconds) == (3.0, 0.5)
    look.add(_view(0), _view(1000, rtt_seconds=0.14, buffer_seconds=0.5), 1001)
    assert (look.queued, look.limited_seconds) == (True, 1.0), "a buffer that is smaller than wanted holds back"


def test_the_kernel_tells_of_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as line:
        other, _ = listener.accept()
        with other:
            before = tcp_info(line)
            line.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(other.recv(left))
            after = tcp_info(line)
    assert before is not None
    assert after is not None
    assert 0 < after.min_rtt_seconds <= after.rtt_seconds < 1
    assert after.segments > before.segments == 0
    assert after.resent == 0
    assert after.buffer_bytes > 1000


def test_a_long_path_begins_with_four_streams() -> None:
    streams = StreamCount()
    assert streams.count == 2
    streams.set_rtt(0.15)
    assert streams.count == 4


def test_short_updates_say_nothing_of_the_streams() -> None:
    streams = StreamCount()
    streams.set_rtt(0.07)
    _held(streams, *[100] * 8, seconds=0.2)
    assert streams.count == 2


def test_a_chunk_holds_what_a_stream_has_in_flight_and_shrinks_towards_the_end() -> None:
    bandwidth_delay = 500e6 / 8 * 0.15
    assert largest_chunk_bytes(4, bandwidth_delay) > bandwidth_delay / 4
    assert chunk_bytes(1 << 30, 4, bandwidth_delay) == 4 << 20
    assert chunk_bytes(1 << 30, 4, 0.0) == 1 << 20
    assert chunk_bytes(2 << 20, 4, bandwidth_delay) == 256 << 10
    assert chunk_bytes(1000, 4, bandwidth_delay) == 1000


def test_a_send_buffer_is_the_streams_share_of_two_bandwidth_delay_products() -> None:
    assert buffer_bytes(0, 1) == 4 << 20
    assert buffer_bytes(10e6, 1) == 20_000_000
    assert buffer_bytes(10e6, 4) == 5_000_000
    assert buffer_bytes(1e9, 1) == 64 << 20


def test_a_head_is_read_back_and_an_impossible_one_refused() -> None:
    head = FrameHead(FrameKind.CHUNK, 7, 1 << 20, 5 << 30, 0xFFFFFFFF)
    packed = head.pack()
    assert len(packed) == HEAD_BYTES
    assert parse(packed) == head
    for wrong in (b"\0" * HEAD_BYTES, b"\xff" * HEAD_BYTES, FrameHead(FrameKind.OFFER, 1, 1 << 30).pack()):
        with pytest.raises(GeofedError) as raised:
            parse(wrong)
        assert raised.value.code == "FRAME_INVALID"


_WANT = sync_pb2.OfferReply.VERDICT_WANT


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (FrameKind.REPLY, b"\xff" * 9),
        (FrameKind.FAULT, b"\xff" * 9),
        (FrameKind.REPLY, sync_pb2.OfferReply(next=1 << 63).SerializeToString()),
        (
            FrameKind.REPLY,
            sync_pb2.OfferReply(verdict=_WANT, have=[sync_pb2.Range(begin=0, end=101)]).SerializeToString(),
        ),
    ],
)
def test_what_a_receiver_may_not_answer_ends_its_stream_and_nothing_else(kind: FrameKind, payload: bytes) -> None:
    """It would end the sending server, were it not a coded error of this link."""
    near, far = socket.socketpair()
    with near, far:
        stream = FrameStream(near)  # type: ignore[arg-type]
        transfer = Transfer(sync_pb2.UpdateManifest(), memoryview(bytes(100)), b"", None, 7, 0.0)
        far.sendall(frame(kind, 7, payload))
        stream._incoming += near.recv(1 << 16)
        with pytest.raises(GeofedError) as refused:
            stream._digest(transfer)
    assert refused.value.code == "FRAME_INVALID"


@pytest.mark.parametrize("port", [0, 1 << 16, (1 << 32) - 1])
def test_what_is_no_port_is_out_of_reach(port: int) -> None:
    with pytest.raises(OSError, match="is no port"):
        dial(("127.0.0.1", port), "west", Tls(b"", b"", b""), 1.0)
