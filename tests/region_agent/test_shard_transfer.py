"""A shard's way from one agent to another: whole, resumed, verified, and only where its owner lets it go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pki import Authority
from support.relay import Relay

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import channel, error_of, region_name
from geofed_pb.v1 import agent_pb2, sync_pb2, sync_pb2_grpc
from region_agent.config import DatasetConfig, RegionConfig, SplitConfig, StoreConfig, load_config
from region_agent.partition.events import RecordEvent
from region_agent.shards import listing, receiving
from region_agent.shards.listing import FileContent, Listed, ListedFile, ShardManifest, read_list, shard_bytes
from region_agent.shards.reading import shard_files
from region_agent.shards.receiving import ShardPort, ShardStore, open_port
from region_agent.shards.sending import Sending, SendingContext
from region_agent.state.store import AgentStore
from region_agent.worker.invocation import ShardFile
from sync.file_transfer.file_receiver import MAX_UPDATE_BYTES
from sync.file_transfer.manifest import Manifest, Verdict
from sync.framing import digest_of
from sync.tcp_streams.partial_file import PartialFile

MIB = 1 << 20
JOB = "job-1"
AUTHORITY = Authority()
IDENTITIES = {name: AUTHORITY.region(name) for name in ("east", "west", "north")}
FILES = {"train/a/big.bin": 12 * MIB, "train/a/b/small.bin": 1000, "train/empty": 0, "train/more.bin": 300_000}


def _config(folder: Path, name: str, cloud: str = "one", residency: str = "anywhere") -> RegionConfig:
    path = folder / f"{name}.yaml"
    path.write_text(f"""\
apiVersion: geofed/v1
kind: Region
metadata: {{name: {name}}}
cloud: {cloud}
capacity: {{workers: 1}}
prices: {{source: t, asOf: 2026-11, functionUsdPerGbSecond: 0.1, functionUsdPerRequest: 0, serverUsdPerHour: 1,
         egressUsdPerGb: 0.5}}
server: {{exchangeHost: 127.0.0.1}}
datasets:
  digits:
    residency: {residency}
    splits:
      train: {{uri: data/train/, samples: 10}}
      test: {{uri: data/test.bin, samples: 2}}
""")
    return load_config(path)


@dataclass
class Source:
    """The region that holds the shard, as its agent would run it."""

    folder: Path
    config: RegionConfig
    reports: list[agent_pb2.PartitionReport] = field(default_factory=list)
    events: list[RecordEvent] = field(default_factory=list)
    sending: Sending | None = None

    def __post_init__(self) -> None:
        self.store = AgentStore(self.folder / "agent.db")

    def send(self, address: str, to: str = "west", *, sent: bool = False) -> Sending:
        hands = SendingContext(
            self.config,
            self.store,
            lambda: IDENTITIES["east"],
            self.folder / "sending",
            lambda message, durable: self.reports.append(message),
            lambda job, event: self.events.append(event),
        )
        order = agent_pb2.SendShard(job=JOB, epoch=1, dataset="digits", to=to, address=address)
        self.sending = Sending(hands, order, sent=sent)
        self.sending.begin()
        return self.sending

    async def until(self, *states: str, seconds: float = 60.0) -> str:
        async with asyncio.timeout(seconds):
            while self.reports[-1].state not in states:  # noqa: ASYNC110 - seen as the control plane sees it
                await asyncio.sleep(0.02)
        return self.reports[-1].state

    @property
    def sent_bytes(self) -> int:
        return int(self.store.meters(JOB).get("sent_bytes:west", 0))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    folder = tmp_path / "east"
    for name, size in FILES.items():
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    (folder / "data" / "test.bin").write_bytes(b"test" * 100)
    return Source(folder, _config(folder, "east"))


@dataclass
class Taker:
    """The region that processes it."""

    shard_store: ShardStore
    port: ShardPort
    address: str


@contextlib.asynccontextmanager
async def taking(folder: Path, *, cloud: str = "one", planned: int = 13 * MIB) -> AsyncIterator[Taker]:
    folder.mkdir(exist_ok=True)
    config = _config(folder, "west", cloud)
    shard_store = ShardStore(folder / "shards" / JOB / "east", "east", "digits", planned)
    port = ShardPort(JOB, "west", cloud, [shard_store])
    async with open_port(port, config, lambda: IDENTITIES["west"]) as address:
        yield Taker(shard_store, port, address)


def runs(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def call(source: Source, tmp_path: Path) -> None:
        async def within() -> None:
            try:
                await test(source, tmp_path / "west")
            finally:
                if source.sending is not None:
                    await source.sending.close()

        asyncio.run(within())

    call.__name__, call.__doc__ = test.__name__, test.__doc__
    return call


def lead_through(relay: Relay, port: ShardPort) -> Callable[[], None]:
    """Have files come over a relay; returns what has them come straight again."""
    bulk = port.bulk
    assert bulk is not None
    before, bulk.port = bulk.port, int(relay.address.rpartition(":")[2])
    relay.to = ("127.0.0.1", before)
    return lambda: setattr(bulk, "port", before)


async def _cut(relay: Relay) -> None:
    async with asyncio.timeout(60):
        while not relay.cuts:  # noqa: ASYNC110 - a thread cuts
            await asyncio.sleep(0.02)


def check_same(source: Source, shard_store: ShardStore) -> None:
    """What lies there is what lies here, split by split."""
    splits = shard_store.link_splits()
    assert set(splits) == {"train", "test"}
    train = {file.name: Path(file.path).read_bytes() for file in splits["train"]}
    expected = {name.removeprefix("train/"): (source.folder / "data" / name).read_bytes() for name in FILES}
    assert train == expected
    (test,) = splits["test"]
    assert not test.folder
    assert Path(test.path).read_bytes() == (source.folder / "data" / "test.bin").read_bytes()
    assert all(file.shard == "east" for files in splits.values() for file in files)


@runs
async def test_a_shard_arrives_as_it_is_and_what_it_cost_is_counted(source: Source, west: Path) -> None:
    async with taking(west) as taker:
        source.send(taker.address)
        await asyncio.wait_for(taker.port.complete(), 60)
        assert await source.until("sent") == "sent"
        check_same(source, taker.shard_store)
    total = sum(FILES.values()) + 400
    last = source.reports[-1]
    assert total < last.totals.sent_bytes["west"] < total * 1.05 + 10_000
    (money,) = last.totals.money
    assert (money.item, money.unit) == ("egress to west", "GB")
    assert money.usd == pytest.approx(last.totals.sent_bytes["west"] / 1e9 * 0.5)
    assert [event.kind for event in source.events] == ["shard.sending", "shard.sent"]
    assert taker.shard_store.list is not None
    assert source.events[-1].data["digest"] == taker.shard_store.list.digest


@runs
async def test_a_cut_costs_little_more_than_what_was_on_its_way(source: Source, west: Path) -> None:
    with Relay() as relay:
        async with taking(west) as taker:
            relay.cut_after = 5 * MIB
            lead_through(relay, taker.port)
            source.send(taker.address)
            await asyncio.wait_for(taker.port.complete(), 60)
            await source.until("sent")
            assert relay.cuts == 1
            check_same(source, taker.shard_store)
    # Two streams, a chunk of up to 4 MiB in the kernel's buffers of each.
    assert source.sent_bytes < sum(FILES.values()) + 9 * MIB


@runs
async def test_both_agents_may_die_in_the_middle(source: Source, west: Path) -> None:
    """What has come stays, and only what lacks is sent by the next life of both."""
    with Relay() as relay:
        relay.stays_cut, relay.cut_after = True, 11 * MIB
        async with taking(west) as taker:
            lead_through(relay, taker.port)
            sending = source.send(taker.address)
            await _cut(relay)
            await sending.close()
            assert not taker.shard_store.complete
        # What was still in the kernel when the line was cut never came.
        (record,) = west.rglob("*.have")
        part = record.with_suffix(".part")
        arrived = sum(end - begin for begin, end in PartialFile(part, part.stat().st_size).have)
        assert arrived > 0
        before = source.sent_bytes
        async with taking(west) as taker:
            source.send(taker.address)
            await asyncio.wait_for(taker.port.complete(), 60)
            await source.until("sent")
            check_same(source, taker.shard_store)
    assert before >= arrived
    assert source.sent_bytes - before < sum(FILES.values()) - arrived + 20_000


@runs
async def test_what_is_there_whole_is_not_sent_again(source: Source, west: Path) -> None:
    async with taking(west) as taker:
        source.send(taker.address)
        await source.until("sent")
        check_same(source, taker.shard_store)
    before = source.sent_bytes
    async with taking(west) as taker:
        assert taker.shard_store.complete
        source.reports.clear()
        source.send(taker.address)
        await source.until("sent")
    assert source.sent_bytes == before
    source.reports.clear()
    source.send("127.0.0.1:1", sent=True)
    assert await source.until("sent") == "sent", "the next life of the agent knows that it is done"


@pytest.mark.parametrize(
    ("residency", "cloud", "code"),
    [
        ("region", "one", "RESIDENCY_VIOLATION"),
        ("cloud", "two", "RESIDENCY_VIOLATION"),
        ("[north]", "one", "RESIDENCY_VIOLATION"),
        ("[]", "one", "RESIDENCY_VIOLATION"),
        ("cloud", "one", ""),
        ("[north, west]", "two", ""),
    ],
)
def test_the_owner_decides_where_it_may_go(
    source: Source, tmp_path: Path, residency: str, cloud: str, code: str
) -> None:
    """Whatever was asked; of its cloud the other region speaks for itself."""

    async def within() -> None:
        source.config = _config(source.folder, "east", residency=residency)
        async with taking(tmp_path / "west", cloud=cloud) as taker:
            sending = source.send(taker.address)
            state = await source.until("sent", "refused")
            await sending.close()
        assert state == ("refused" if code else "sent")
        assert source.reports[-1].error.code == code
        if code:
            assert source.sent_bytes == 0
            assert taker.shard_store.list is None, "not even the names of its files are told"

    asyncio.run(within())


@pytest.mark.slow
@runs
async def test_another_region_at_the_address_gets_nothing(source: Source, west: Path) -> None:
    """The order names north, but west answers: its certificate gives it away."""
    async with taking(west) as taker:
        source.send(taker.address, to="north")
        await asyncio.sleep(1.5)
        assert taker.shard_store.list is None
    assert source.reports[-1].state == "sending"
    assert "retrying" in source.reports[-1].condition


@runs
async def test_only_the_source_may_bring_its_shard(source: Source, west: Path) -> None:
    async with taking(west) as taker:
        for who, job in (("north", JOB), ("east", "job-2")):
            tls = IDENTITIES[who]
            async with channel(
                taker.address,
                ca_pem=tls.ca_pem,
                name=region_name("west"),
                certificate_pem=tls.certificate_pem,
                key_pem=tls.key_pem,
            ) as line:
                offer = sync_pb2.UpdateManifest(
                    job=job, region=who, epoch=1, sequence=1, digest="sha256:" + "0" * 64, total_bytes=10
                )
                for call in (
                    sync_pb2_grpc.ShardPortStub(line).Introduce(sync_pb2.IntroduceRequest(job=job)),
                    sync_pb2_grpc.ExchangeStub(line).Offer(offer),
                ):
                    with pytest.raises(grpc.RpcError) as raised:
                        await call
                    assert error_of(raised.value).code == "FORBIDDEN"


@runs
async def test_what_is_not_on_the_list_is_not_wanted(source: Source, west: Path) -> None:
    """Nor a file under another number than its own."""
    async with taking(west) as taker:
        source.send(taker.address)
        await asyncio.wait_for(taker.port.complete(), 60)
        assert taker.shard_store.list is not None
        files = taker.shard_store.list.files
        for number, file in enumerate(files, 2):
            if file.size:
                right = Manifest("east", 1, number, file.digest, file.size, 0.0)
                assert taker.shard_store.verdict(right) is Verdict.HAVE
                for wrong in (
                    replace(right, sequence=number % len(files) + 2),
                    replace(right, sequence=len(files) + 2),
                    replace(right, digest=digest_of([b"other"])),
                    replace(right, total_bytes=file.size + 1),
                ):
                    assert taker.shard_store.verdict(wrong) is Verdict.LATER


@runs
async def test_a_file_that_changes_on_the_way_is_read_again(source: Source, west: Path) -> None:
    with Relay() as relay:
        relay.stays_cut, relay.cut_after = True, 3 * MIB
        async with taking(west) as taker:
            direct = lead_through(relay, taker.port)
            source.send(taker.address)
            await _cut(relay)
            (source.folder / "data" / "train/a/big.bin").write_bytes(os.urandom(2 * MIB))
            direct()
            await asyncio.wait_for(taker.port.complete(), 60)
            await source.until("sent")
            check_same(source, taker.shard_store)


@runs
async def test_a_file_that_is_cut_off_while_it_is_read_is_read_again(source: Source, west: Path) -> None:
    """In place, by its owner: the size is another after a piece of it has been asked for."""
    big, cut = source.folder / "data" / "train/a/big.bin", False
    opened = Listed.content

    def content(self: Listed, index: int) -> FileContent:
        nonlocal cut
        found = opened(self, index)
        if self.paths[index] == big and not cut:
            os.truncate(big, 2 * MIB)
            cut = True
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Listed, "content", content)
        async with taking(west) as taker:
            source.send(taker.address)
            await asyncio.wait_for(taker.port.complete(), 60)
            await source.until("sent")
            assert cut
            check_same(source, taker.shard_store)


def test_what_is_not_there_to_be_read_is_told(tmp_path: Path) -> None:
    """A mapped file would end the process with SIGBUS instead."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(10_000))
    content, whole = FileContent(path, 10_000), path.read_bytes()
    assert len(content) == 10_000
    assert (content[0:10_000], content[9_000:20_000], content[5:5]) == (whole, whole[9_000:], b"")
    os.truncate(path, 5_000)
    assert content[0:5_000] == whole[:5_000]
    for piece in (slice(4_999, 5_001), slice(5_000, 10_000)):
        with pytest.raises(GeofedError) as raised:
            content[piece]
        assert raised.value.code == "SHARD_UNREADABLE"
    before = len(os.listdir("/proc/self/fd"))
    del content, raised
    assert len(os.listdir("/proc/self/fd")) == before - 1


@pytest.mark.parametrize("side", [listing, receiving])
def test_a_list_that_is_too_long_is_told_and_not_sent_for_ever(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: ModuleType
) -> None:
    """Whoever finds that it is."""
    monkeypatch.setattr(side, "MAX_LIST_BYTES", 100)

    async def within() -> None:
        async with taking(tmp_path / "west") as taker:
            sending = source.send(taker.address)
            assert await source.until("refused", "failed") == "refused"
            await sending.close()

    asyncio.run(within())
    assert source.reports[-1].error.code == "LIMIT_EXCEEDED"
    if side is listing:
        assert source.sent_bytes == 0
        assert shard_bytes(shard_files(source.config.datasets["digits"], {})) == {}, "no plan may count on it"


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=40)
        ),
        min_size=1,
        unique=True,
    )
)
def test_a_list_is_not_longer_than_was_counted_on(names: list[tuple[str]]) -> None:
    files = tuple(ListedFile(**_file(name=name, size=MAX_UPDATE_BYTES)) for (name,) in names if name not in (".", ".."))
    if files:
        told = ShardManifest(dataset="d", files=files)
        counted = listing.list_bytes({"train": tuple(ShardFile(name=file.name) for file in files)})
        assert len(told.to_bytes()) <= counted + 100


@pytest.mark.slow
def test_a_shard_in_an_object_store_takes_the_same_way(tmp_path: Path, store: StoreConfig) -> None:
    async def within() -> None:
        folder = tmp_path / "east"
        folder.mkdir()
        splits = {
            "train": SplitConfig(uri="s3://shards/train/", samples=1),
            "test": SplitConfig(uri="s3://shards/one.npz", samples=1),
        }
        held = DatasetConfig(store="minio", splits=splits, residency="anywhere")
        assert shard_bytes(shard_files(held, {"minio": store})) == {"train": 1001, "test": 3}
        config = _config(folder, "east").model_copy(update={"datasets": {"digits": held}, "stores": {"minio": store}})
        source = Source(folder, config)
        async with taking(tmp_path / "west") as taker:
            sending = source.send(taker.address)
            await asyncio.wait_for(taker.port.complete(), 60)
            assert await source.until("sent") == "sent"
            await sending.close()
            laid = taker.shard_store.link_splits()
        found = {file.name: Path(file.path).read_bytes() for files in laid.values() for file in files}
        assert found == {"a.npy": b"a" * 1000, "deep/b.npy": b"b", "one.npz": b"one"}
        assert not list((folder / "sending").iterdir()), "nothing is left of what was brought from the store"

    asyncio.run(within())


@runs
async def test_a_shard_that_has_grown_beyond_measure_is_not_taken(source: Source, west: Path) -> None:
    (source.folder / "data" / "train/more.bin").write_bytes(bytes(80 * MIB))
    async with taking(west, planned=MIB) as taker:
        source.send(taker.address)
        with pytest.raises(GeofedError) as raised:
            await asyncio.wait_for(taker.port.complete(), 60)
        assert raised.value.code == "LIMIT_EXCEEDED"
    assert source.sent_bytes < MIB


def _file(**changed: Any) -> dict[str, Any]:
    entry = {"split": "train", "name": "a", "folder": True, "size": 1, "digest": digest_of([b"x"])}
    return {**entry, **changed}


@pytest.mark.parametrize(
    "files",
    [
        [],
        [_file(name="../a")],
        [_file(name="/a")],
        [_file(name="a/../../b")],
        [_file(name="")],
        [_file(name="a\0b")],
        [_file(name="./a")],
        [_file(split="../x")],
        [_file(split="")],
        [_file(size=-1)],
        [_file(digest="sha256:../../x")],
        [_file(), _file()],
        [_file(folder=False), _file(name="b", folder=False)],
        [_file(folder=False), _file(name="b")],
        [_file(more=1)],
        [_file(name="a"), _file(name="a/b")],
        [_file(name="a-b"), _file(name="a/b/c"), _file(name="a/b")],
    ],
)
def test_a_list_that_leads_elsewhere_is_refused(files: list[dict[str, Any]]) -> None:
    with pytest.raises(GeofedError) as raised:
        read_list(json.dumps({"dataset": "digits", "files": files}).encode())
    assert raised.value.code == "FRAME_INVALID"


def test_keys_that_no_folder_can_hold_are_told_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    files = tuple(ShardFile(name=name, url=f"https://store/{name}", size=1) for name in ("a", "a/b"))
    monkeypatch.setattr(listing, "shard_files", lambda dataset, stores: {"train": files})
    with pytest.raises(GeofedError) as raised:
        listing.listed("digits", DatasetConfig(splits={}), {}, Path("/nowhere"))
    assert raised.value.code == "SHARD_UNREADABLE"
    assert "a is an object's key" in raised.value.message
    assert shard_bytes({"train": files}) == {}


def test_a_list_is_what_it_was() -> None:
    more = [ListedFile(**_file(split="test")), *(ListedFile(**_file(name=name)) for name in ("b/c", "b/d", "b-"))]
    told = ShardManifest(dataset="digits", files=(ListedFile(**_file()), *more))
    assert read_list(told.to_bytes()) == told
    assert read_list(told.to_bytes()).digest == told.digest
