"""Background exchange with the real numbers, disk and channel, while a server dies before any file operation.

Every region's change in every round is known beforehand, so what the model must hold at the end is a plain sum: an
update that got lost, counted twice, or was sent beside what its codec had held back, shows.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.at_once import AtOnce
from support.budget import budget, stride

from sync import framing
from sync.channel_clients import FileChannel, _buffer_pool
from sync.codec import codec_named
from sync.file_transfer.arrival import Arrival
from sync.file_transfer.manifest import Manifest, PeerAddress, Verdict
from sync.layout import Layout, Slot, Vector
from sync.ps.core.actions import Failed, Refuse, Reply, SendUpdates, SetTimer
from sync.ps.core.answers import AttachAnswer, BoundaryAnswer
from sync.ps.core.background import Background
from sync.ps.core.events import (
    Attached,
    BoundaryArrived,
    Configured,
    Evaluated,
    Event,
    Measured,
    PeerHas,
    PeerUnreachable,
    SendAttempted,
    SumGone,
    TimerFired,
    UpdateStored,
)
from sync.ps.core.machine import Setup
from sync.ps.execution import checkpoints
from sync.ps.execution import executor as executor_module
from sync.ps.execution.checkpoint_file import PendingCheckpoint
from sync.ps.execution.executor import ActionExecutor
from sync.ps.execution.storage import Storage
from sync.wan import ExchangeSettings, policy_of

REGIONS = ("a", "b")
SHARES = {"a": 0.6, "b": 0.4}
ROUNDS = 8
SIZE = 700
LAYOUT = Layout((Slot("w", (SIZE,), "float32"),), 1)
FIRST = np.linspace(-1, 1, SIZE, dtype=np.float32)
MOST_EVENTS = 20_000
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where nothing waits for a disk: when a file was flushed is what counts here."""


class Death(BaseException):
    """The process is gone; nothing that it would still have done is done."""


@cache
def change(region: str, sequence: int) -> Vector:
    """What a region's workers make of a model in a round."""
    seed = np.random.default_rng((ord(region), sequence))
    return seed.normal(0, 0.1, SIZE).astype(np.float32)


@pytest.fixture(autouse=True)
def small_files_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_buffer_pool, "MIN_BYTES", 0)


class Platter:
    """What a loss of power leaves of a folder at worst: contents that were flushed, under names that were, and of
    files that are being written over a half of either."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._contents: dict[int, bytes] = {}
        """By inode."""
        self._names: dict[Path, tuple[int, bytes]] = {}

    def flushed(self, descriptor: int) -> None:
        path, inode = Path(os.readlink(f"/proc/self/fd/{descriptor}")), os.fstat(descriptor).st_ino
        if not path.is_relative_to(self._folder):
            return
        if not path.is_dir():
            content = self._contents[inode] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            if self._names.get(path, (0, b""))[0] == inode:
                self._names[path] = inode, content
            return
        elsewhere = {name: held for name, held in self._names.items() if name.parent != path}
        files = [(file, file.stat().st_ino) for file in path.iterdir() if file.is_file()]
        self._names = elsewhere | {file: (number, self._contents.get(number, b"")) for file, number in files}

    def lose_the_rest(self) -> None:
        written: dict[int, bytes] = {}
        for file in [file for file in self._folder.rglob("*") if file.is_file()]:
            written[file.stat().st_ino] = file.read_bytes()
            file.unlink()
        for file, (number, content) in self._names.items():
            over = written.get(number, b"") if file.suffix == ".frame" else b""
            half = len(over) // 2
            file.write_bytes(over[:half] + content[half:])
        self._names = {file: (file.stat().st_ino, file.read_bytes()) for file in self._names}
        self._contents = dict(self._names.values())


class Later(Executor):
    """Checkpoints are made when somebody waits for them, or has asked a few times whether they are; never, if the
    process dies before."""

    begun: ClassVar[list[PendingCheckpoint]] = []

    def __init__(self, asked: int) -> None:
        self._asked = asked

    @classmethod
    def die(cls, folder: Path) -> None:
        """What a process has open is closed when it ends."""
        for draft in [draft for draft in cls.begun if draft.folder.is_relative_to(folder)]:
            cls.begun.remove(draft)
            for _, file in draft.written:
                file.close()

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        self.begun.extend(draft for draft in given if isinstance(draft, PendingCheckpoint))
        return Promised(lambda: work(*given, **named), self._asked)


class Promised:
    """What a `Later` answers with."""

    def __init__(self, work: Callable[[], Any], asked: int) -> None:
        self._work, self._asked, self._made = work, asked, False

    def done(self) -> bool:
        self._asked -= 1
        if self._asked < 0:
            self.result()
        return self._made

    def result(self) -> Any:
        if not self._made:
            self._outcome, self._made = self._work(), True
        return self._outcome


class Operations:
    """Counts what a mortal process does to files; dies before one of them, or in the middle of a line of the log."""

    platter: Platter | None = None
    """The power goes with the process."""
    sums = 0
    """Sums that were sent in place of updates."""

    def __init__(self, patch: pytest.MonkeyPatch, deaths: list[int]) -> None:
        self._deaths, self._armed, self.count, self.died = list(deaths), False, 0, 0
        for name in ("replace", "fsync", "fdatasync", "unlink", "truncate", "write"):
            self._wrap(patch, name)

    def _wrap(self, patch: pytest.MonkeyPatch, name: str) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def operation(*arguments: Any, **options: Any) -> Any:
            if self._armed:
                if self._deaths and self.count >= self._deaths[0]:
                    self._deaths.pop(0)
                    self.count, self.died, self._armed = 0, self.died + 1, False
                    if name == "write":
                        real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                    raise Death
                self.count += 1
            done = real(*arguments, **options)
            if self._armed and self.platter is not None and name in ("fsync", "fdatasync"):
                self.platter.flushed(arguments[0])
            return done

        patch.setattr(os, name, operation)

    @contextmanager
    def armed(self, mortal: bool) -> Iterator[None]:
        self._armed = mortal
        try:
            yield
        finally:
            self._armed = False


@dataclass
class Worker:
    """The one worker of a region; it outlives the server, and asks it again what it has not been told."""

    sequence: int = 0
    step: int = 0
    model: Vector = field(default_factory=FIRST.copy, repr=False)
    doing: str = "attach"
    known: bool = False
    """The round's end was handed over by an earlier life of the worker."""
    attempt: int = 1
    made: int = 0


class Site:
    """One region: files that last, and a server that may die."""

    def __init__(self, folder: Path, region: str, codec: str, operations: Operations) -> None:
        self.name, self._folder, self._codec, self._operations = region, folder / region, codec, operations
        self.setup = Setup(region, REGIONS, 1, ROUNDS, 1, 0, background=True, sums=True)
        self.mortal = region == "a"
        self.damaged = False
        self.worker = Worker()
        self.calls = 0
        self.now = 0.0
        """Seconds of its clock, which moves with its worker's rounds and its timers."""
        self.end_of_life()

    def end_of_life(self) -> None:
        self.machine: Background | None = None
        self.answers: dict[int, Any] = {}
        self.to_send: list[Manifest] = []
        self.timer: SetTimer | None = None
        self.asking = 0

    def live(self, doing: Callable[[], None]) -> None:
        """Let the server do something; it may be its last."""
        try:
            with self._operations.armed(self.mortal):
                doing()
        except Death:
            Later.die(self._folder)
            if self._operations.platter is not None:
                self._operations.platter.lose_the_rest()
                shutil.rmtree(self._folder / "channel")
                self.worker = Worker(attempt=self.worker.attempt + 1)
            self.end_of_life()

    def damage(self) -> None:
        """The process ends, and its newest checkpoint is damaged; the worker lives on."""
        self.damaged = True
        Later.die(self._folder)
        self.end_of_life()
        path = max((self._folder / "ps").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        content = bytearray(path.read_bytes())
        content[-2] ^= 1
        path.write_bytes(content)

    def start(self) -> None:
        self.storage = Storage(self._folder / "ps", self.setup)
        self.channel = FileChannel(self._folder / "channel")
        exchange, policy = ExchangeSettings(background=1.0, guard=0.0), policy_of("ma")
        codec = codec_named(self._codec)
        self.executor = ActionExecutor(self.setup, self.storage, self.channel, policy, codec, exchange, SHARES)
        self.machine = Background(self.setup, self.executor.recover())
        peers = tuple(PeerAddress(name, 1, "") for name in REGIONS if name != self.name)
        self.feed(Configured(1, self.worker.attempt, peers))

    def feed(self, event: Event) -> None:
        events = deque([event])
        while events:
            assert self.machine is not None
            for action in self.machine.handle(events.popleft(), Measured(self.now)):
                match action:
                    case Reply():
                        self.answers[action.call] = action.answer
                    case Refuse():
                        self.answers[action.call] = action
                    case SendUpdates():
                        self.to_send = list(action.manifests)
                    case SetTimer():
                        self.timer = action
                    case Failed():
                        raise AssertionError(action)
                    case _:
                        followed = self.executor.do(action, self.machine.attempt)
                        if followed is not None:
                            events.append(followed)

    # Its worker

    def work(self) -> None:
        worker = self.worker
        if worker.doing == "done":
            return
        if self.asking and self.asking in self.answers:
            answer = self.answers.pop(self.asking)
            self.asking = 0
            if isinstance(answer, Refuse):
                assert (self.damaged, answer.code) == (True, "FENCED"), answer
                self.begin_new_attempt()
                return
            self._heard(answer)
        elif not self.asking:
            self.calls += 1
            self.asking = self.calls
            if worker.doing == "train":
                self.now += 1.0 + REGIONS.index(self.name)
                worker.model = worker.model + change(self.name, worker.sequence + 1)
                worker.step, worker.doing, worker.made = worker.step + 1, "tell", worker.made + 1
                self._put(self._key("model"), {"model": worker.model})
                if worker.step % 2:
                    # All that this worker's optimiser knows is how many rounds it has made.
                    self._put(self._key("state"), {"rounds": np.float32([worker.sequence + 1])})
            elif worker.doing == "attach":
                self._put("init", {"model": FIRST})
            question = self._question(self.calls)
            self.live(lambda: self._ask(question))

    def _ask(self, question: Event) -> None:
        if isinstance(question, Attached):
            self.storage.keep_layout(LAYOUT)
        self.feed(question)

    def _question(self, call: int) -> Event:
        worker, attempt = self.worker, self.worker.attempt
        if worker.doing == "attach":
            return Attached(call, 0, attempt, "init")
        if worker.doing == "measure":
            return Evaluated(call, 0, attempt, worker.sequence, 1.0, {"loss": 0.5})
        digest, key = ("", "") if worker.known else ("alone", self._key("model"))
        state = self._key("state") if worker.step % 2 and not worker.known else ""
        return BoundaryArrived(call, 0, attempt, worker.sequence + 1, worker.step, digest, key, state, 8.0, 0.5, 0.1)

    def _heard(self, answer: Any) -> None:
        worker = self.worker
        if isinstance(answer, AttachAnswer):
            worker.sequence, worker.step, worker.known = answer.sequence, answer.step, answer.boundary
            if answer.model_key:
                worker.model = self._read(answer.model_key, "model")
            if answer.state_key:
                (rounds,) = self._read(answer.state_key, "rounds")
                # Of an earlier round where none went with the last one, or it was lost with the server.
                assert 0 < rounds <= worker.sequence
            worker.doing = "tell" if answer.boundary else "train"
            if answer.finished:
                worker.doing = "measure" if answer.evaluate else "done"
        elif isinstance(answer, BoundaryAnswer):
            worker.sequence, worker.known = answer.sequence, False
            if answer.model_key:
                worker.model = self._read(answer.model_key, "model")
            elif answer.correction_key:
                worker.model = worker.model + self._read(answer.correction_key, "correction")
            worker.doing = "train"
            if answer.finished:
                worker.doing = "measure" if answer.evaluate else "done"
        else:
            worker.doing = "done"

    def begin_new_attempt(self) -> None:
        """The worker is lost: another one begins with what the server says."""
        if self.machine is None or self.worker.doing in ("done", "measure"):
            return
        attempt = self.worker.attempt + 1
        self.worker, self.asking = Worker(attempt=attempt), 0
        self.live(lambda: self.feed(Configured(1, attempt, ())))

    def _key(self, name: str) -> str:
        return f"b/{self.worker.attempt}/{self.worker.sequence + 1}/{name}"

    def _put(self, key: str, tensors: dict[str, Vector]) -> None:
        # The worker does not die with the server.
        FileChannel(self._folder / "channel").put(key, framing.encode(tensors))

    def _read(self, key: str, name: str) -> Vector:
        value = FileChannel(self._folder / "channel").get(key)
        assert value is not None, f"{key} is gone"
        return np.array(framing.decode(value).tensors[name], np.float32)

    # Updates

    def take(self, manifest: Manifest, data: bytes) -> None:
        """An update comes in."""
        place = self.storage.update_path(manifest.region, manifest.sequence, manifest.first)
        arrival = Arrival(manifest, place)
        for offset in range(arrival.file.prefix, len(data), 600):
            arrival.append(offset, data[offset : offset + 600])
        arrival.complete(lambda *_: None)
        self.feed(UpdateStored(manifest))


class Federation:
    """Two regions, of which one is mortal."""

    def __init__(
        self, folder: Path, codec: str, operations: Operations, seed: int, *, lose_workers: bool, cuts: bool
    ) -> None:
        self.sites = {region: Site(folder, region, codec, operations) for region in REGIONS}
        self._random, self._lose_workers = random.Random(seed), lose_workers
        self._cuts, self._cut = cuts, False
        self.sums = 0
        """Of updates, that were merged in place of them."""

    def run(self) -> None:
        for _ in range(MOST_EVENTS):
            if all(site.worker.doing == "done" for site in self.sites.values()):
                return
            self._something()
        raise AssertionError({n: (s.worker, s.machine and s.machine.progress) for n, s in self.sites.items()})

    def _something(self) -> None:
        if self._cuts and self._random.random() < 0.01:
            self._cut = not self._cut
        site = self.sites[self._random.choice(REGIONS)]
        if site.machine is None:
            site.live(site.start)
            return
        chance = self._random.random()
        if chance < 0.6:
            site.work()
        elif chance < 0.95:
            self._send(site)
        elif chance < 0.97 and site.timer is not None:
            site.now, site.timer = max(site.now, site.timer.at), None
            site.live(lambda: site.feed(TimerFired()))
        elif chance > 0.99 and self._lose_workers:
            site.begin_new_attempt()

    def _send(self, sender: Site) -> None:
        (receiver,) = (site for site in self.sites.values() if site is not sender)
        if not sender.to_send or receiver.machine is None:
            return
        # In order, as senders send: who has an update has all before it.
        manifest = sender.to_send[0]
        if self._cut:
            sender.live(lambda: sender.feed(PeerUnreachable(receiver.name)))
            return
        verdict = receiver.machine.verdict(manifest, sender.name)
        if verdict is Verdict.WANT:
            if not sender.storage.path_of(manifest).exists():
                sender.live(lambda: sender.feed(SumGone(manifest)))
                return
            data = sender.storage.path_of(manifest).read_bytes()
            sender.live(lambda: sender.feed(SendAttempted(receiver.name, manifest)))
            receiver.live(lambda: receiver.take(manifest, data))
            self.sums += bool(manifest.first)
            if receiver.machine is None or sender.machine is None or self._random.random() < 0.2:
                return  # the acknowledgement is lost: it is offered again
        elif verdict is not Verdict.HAVE:
            told = receiver.machine.ledger.newest(manifest.region)
            sender.live(lambda: sender.feed(PeerHas(receiver.name, told, manifest.region)))
            return
        if manifest in sender.to_send:
            sender.to_send.remove(manifest)
        sender.live(lambda: sender.feed(PeerHas(receiver.name, manifest.sequence, manifest.region)))

    def check(self, codec: str) -> None:
        """All that was trained is in the model, once."""
        held = np.zeros(SIZE, np.float64)
        expected = FIRST.astype(np.float64)
        for name, site in self.sites.items():
            residual = site.executor.replica.state.residual if site.executor.replica is not None else None
            held += SHARES[name] * (0 if residual is None else residual)
            expected += SHARES[name] * sum(change(name, n).astype(np.float64) for n in range(1, ROUNDS + 1))
        for site in self.sites.values():
            assert site.machine is not None
            assert site.executor.replica is not None
            progress = site.machine.progress
            assert (progress.phase, progress.sequence, progress.step) == ("finished", ROUNDS, ROUNDS)
            assert progress.samples == 8.0 * ROUNDS
            assert progress.applied == ROUNDS + (site.name != REGIONS[0])
            np.testing.assert_allclose(site.executor.replica.model + held, expected, atol=2e-5)
            if codec == "fp32":
                assert not held.any()


def play(
    codec: str,
    deaths: list[int],
    seed: int,
    *,
    lose_workers: bool = False,
    power: bool = False,
    cuts: bool = False,
    late: int = 0,
) -> Operations:
    """``late``: how often it is asked in vain whether a checkpoint is durable."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=IN_MEMORY) as place:
        folder = Path(place)
        ticks = iter(range(1 << 30))
        # Checkpoints by the count of what is done instead of by the clock.
        clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
        for module in (executor_module, checkpoints):
            patch.setattr(module, "time", clock)
        patch.setattr(executor_module, "background_thread", AtOnce)
        patch.setattr(checkpoints, "background_thread", lambda: Later(late))
        operations = Operations(patch, deaths)
        if power:
            operations.platter = Platter(folder / "a" / "ps")
        federation = Federation(folder, codec, operations, seed, lose_workers=lose_workers, cuts=cuts)
        federation.run()
        federation.check(codec)
        operations.sums = federation.sums
    return operations


@pytest.mark.parametrize("codec", ["fp32", "int8", "ternary"])
def test_a_life_without_a_death(codec: str) -> None:
    assert play(codec, [], 1).died == 0


def die_everywhere(codec: str, first: int, *, late: int, power: bool = False) -> None:
    """A death before every so many operations of a life, the ``first`` of them on. A life has two of them, half a life
    apart: what the first one left has long been mended by then."""
    whole = play(codec, [], 7, late=late).count
    assert whole > 100, "the life is longer than that"
    for moment in range(first, (whole + 1) // 2, stride(4)):
        assert play(codec, [moment, whole // 2], 7, late=late, power=power).died == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "late", "first"), [("fp32", 0, 0), ("ternary", 0, 1), ("fp32", 2, 2), ("int8", 3, 3)]
)
def test_a_death_before_any_file_operation_loses_and_doubles_nothing(codec: str, late: int, first: int) -> None:
    die_everywhere(codec, first, late=late)


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 2])
def test_a_loss_of_power_before_any_file_operation_loses_and_doubles_nothing(late: int) -> None:
    """Memory is lost with it, and so are the workers and the channel, with rounds that were not durable yet."""
    die_everywhere("fp32", late, late=late, power=True)


@pytest.mark.slow
@settings(max_examples=budget(20), deadline=None)
@given(
    codec=st.sampled_from(["fp32", "int8", "ternary"]),
    deaths=st.lists(st.integers(0, 90), max_size=8),
    seed=st.integers(0, 1 << 20),
    late=st.integers(0, 4),
)
def test_many_deaths_in_a_row(codec: str, deaths: list[int], seed: int, late: int) -> None:
    play(codec, deaths, seed, late=late)


@pytest.mark.slow
@settings(max_examples=budget(20), deadline=None)
@given(
    codec=st.sampled_from(["fp32", "int8", "ternary"]),
    deaths=st.lists(st.integers(0, 90), max_size=6),
    seed=st.integers(0, 1 << 20),
    cuts=st.booleans(),
    late=st.integers(0, 4),
)
@example(codec="ternary", deaths=[75, 13], seed=0, cuts=False, late=0)
@example(codec="fp32", deaths=[84, 4, 0, 41, 43], seed=86392, cuts=False, late=0)
def test_deaths_of_servers_and_workers(codec: str, deaths: list[int], seed: int, cuts: bool, late: int) -> None:
    play(codec, deaths, seed, lose_workers=True, cuts=cuts, late=late)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_what_is_sent_summed_up_after_a_cut_counts_once(codec: str) -> None:
    """Whenever the one or the other server dies while sums are made, sent or merged."""
    whole = [play(codec, [], seed, cuts=True) for seed in range(budget(20))]
    assert sum(life.sums > 0 for life in whole) > len(whole) / 8
    for seed in range(100, 100 + budget(20)):
        play(codec, [seed * 7 % 90, seed * 11 % 70], seed, cuts=True)


@pytest.mark.slow
@settings(max_examples=budget(20), deadline=None)
@given(
    deaths=st.lists(st.integers(0, 90), max_size=5), seed=st.integers(0, 1 << 20), power=st.booleans(),
    late=st.integers(0, 4),
)  # fmt: skip
def test_deaths_and_cuts(deaths: list[int], seed: int, power: bool, late: int) -> None:
    play("fp32", deaths, seed, power=power, cuts=True, late=late)


@pytest.mark.parametrize("last", [3, 5, 6])
@pytest.mark.parametrize("seed", range(4))
def test_after_a_damaged_checkpoint_every_round_counts_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, last: int
) -> None:
    """The models that the workers ended rounds with before it are gone, so the worker that lives on is fenced: what its
    round began from is not known. ``last``: rounds of the worker before the damage."""
    ticks = iter(range(1 << 30))
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    for module in (executor_module, checkpoints):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "background_thread", AtOnce)
    federation = Federation(tmp_path, "fp32", Operations(monkeypatch, []), seed, lose_workers=False, cuts=False)
    site = federation.sites["a"]
    while site.worker.sequence < last or site.machine is None or len(list(site.storage.folder.glob("check*"))) < 2:
        federation._something()
    before = site.worker.attempt
    site.damage()
    federation.run()
    federation.check("fp32")
    assert site.worker.attempt >= before
