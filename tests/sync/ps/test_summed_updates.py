"""Updates that are sent summed up to a region that was away: whatever happens, every change counts once everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from support.budget import budget
from support.federation_in_miniature import Miniature
from support.small_disk import small_disk

from sync import framing
from sync.channel_clients import FileChannel
from sync.codec import codec_by_mark, codec_named
from sync.file_transfer.manifest import Manifest, PeerAddress, Verdict
from sync.layout import Layout, Slot
from sync.ps.core import summed_updates
from sync.ps.core.actions import SumUp
from sync.ps.core.background import Background
from sync.ps.core.events import Summed, UpdateStored
from sync.ps.core.ledger import Ledger
from sync.ps.core.machine import Recovered, Setup
from sync.ps.execution.executor import ActionExecutor
from sync.ps.execution.replica import Replica, ReplicaState
from sync.ps.execution.storage import Storage
from sync.wan import ExchangeSettings, policy_of
from tests.sync.ps.test_ways import _KINDS, WaysChange, _ways

_NUMBERS = st.integers(0, 1 << 16)


class RegionsAreAway(WaysChange):
    """The same while regions are cut off for long, and come back."""

    @initialize(
        regions=st.integers(2, 4),
        rounds=st.integers(6, 16),
        quorum=st.sampled_from([0, 0, 1]),
        first=st.sampled_from(["mesh", "mesh", "star", "chain"]),
        rerouted=st.booleans(),
    )
    def begin(self, regions: int, rounds: int, quorum: int, first: str, rerouted: bool) -> None:
        ways = _ways(first, regions) if regions > 2 else ()
        self.all = Miniature(
            regions, 1, rounds, 1, 0, quorum=quorum, max_rounds_ahead=0, neighbours=ways, rerouted=rerouted, sums=True
        )
        self.rerouted = rerouted

    @rule(kind=st.sampled_from(_KINDS))
    def the_control_plane_chooses_other_ways(self, kind: str) -> None:
        if self.rerouted:
            self.all.reroute(_ways(kind, len(self.all.sites)))

    @rule(site=_NUMBERS)
    def a_region_is_cut_off(self, site: int) -> None:
        name = self._site(site).name
        self.all.cut = {frozenset((name, other)) for other in self.all.sites if other != name}

    @rule(times=st.integers(5, 30))
    def the_others_go_on_for_long(self, times: int) -> None:
        self.much_goes_well(times=times)  # type: ignore[call-arg]  # a rule takes its arguments by name

    @rule()
    def the_cut_heals(self) -> None:
        self.all.cut = set()

    @rule(a=_NUMBERS, b=_NUMBERS)
    def a_link_is_cut_for_good(self, a: int, b: int) -> None:
        """Whatever is cut here heals."""

    def teardown(self) -> None:
        self.all.cut = set()
        super().teardown()


TestRegionsAreAway = RegionsAreAway.TestCase
TestRegionsAreAway.settings = settings(
    max_examples=budget(100), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


class LinksCarryTooLittle(RegionsAreAway):
    """The same while what waits for a link that carries is summed up as well, however few bytes they are."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(summed_updates, "_BACKLOG_BYTES", 1)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.patch.undo()


TestLinksCarryTooLittle = LinksCarryTooLittle.TestCase
TestLinksCarryTooLittle.settings = settings(TestRegionsAreAway.settings, max_examples=budget(70))


def _go_on(federation: Miniature, times: int) -> None:
    for _ in range(times):
        for name, site in federation.sites.items():
            federation.configure(name)
            if not site.workers[0].call:
                site.let_work(0)
            while site.work:
                site.do_work()
            federation.send(name)
        for message in [federation.wan.pop(0) for _ in range(len(federation.wan))]:
            federation.deliver(message)


def _cut_off(federation: Miniature, name: str) -> None:
    federation.cut = {frozenset((name, other)) for other in federation.sites if other != name}


@pytest.mark.parametrize("regions", [2, 3, 4])
def test_after_a_long_cut_each_side_gets_a_sum_and_little_more(regions: int) -> None:
    federation = Miniature(regions, 1, 60, 1, 0, quorum=0, sums=True)
    _go_on(federation, 20)
    _cut_off(federation, "r1")
    _go_on(federation, 60)
    federation.cut, federation.wan = set(), []
    for name, site in federation.sites.items():
        for to, waiting in site.peer_senders.items():
            if "r1" in (name, to):
                assert sum(manifest.rounds for manifest in waiting.values()) > 10
                assert any(manifest.first for manifest in waiting.values())
                # What was on its way, a sum, and updates that it is not worth yet to make another for.
                assert len(waiting) <= 4
    federation.finish()


def test_whoever_was_not_away_gets_every_update_as_it_is() -> None:
    federation = Miniature(3, 1, 40, 1, 0, quorum=0, sums=True)
    _go_on(federation, 20)
    _cut_off(federation, "r1")
    _go_on(federation, 60)
    federation.cut = set()
    federation.finish()
    mine = federation.sites["r0"].disk.checkpoints[-1].merged
    assert not any(manifest.first for manifest in mine if manifest.region == "r2")
    assert any(manifest.first for manifest in mine if manifest.region == "r1")


def test_a_server_that_knows_nothing_of_sums_gets_none() -> None:
    federation = Miniature(2, 1, 40, 1, 0, quorum=0, sums=True)
    old = federation.sites["r1"]
    old.setup = Setup("r1", old.setup.regions, 1, 40, 1, 0, background=True)
    old.crash()
    old.start()
    _go_on(federation, 20)
    _cut_off(federation, "r1")
    _go_on(federation, 60)
    federation.cut = set()
    federation.finish()
    for site in federation.sites.values():
        sums = [manifest.region for manifest in site.disk.checkpoints[-1].merged if manifest.first]
        assert "r0" not in sums


# The ledger's rules


def _update(sequence: int, region: str = "a", first: int = 0, digest: str = "", total_bytes: int = 1) -> Manifest:
    digest = digest or f"{region}{first or ''}-{sequence}"
    return Manifest(region, 1, sequence, digest, total_bytes, 1.0, first=first, takes_sums=True)


def _sender(regions: str = "abc", total_bytes: int = 1, **has: int) -> Ledger:
    """`a`, which has made ten updates."""
    ledger = Ledger("a", tuple(regions), [], dict.fromkeys(regions, 0))
    ledger.peers = {name: PeerAddress(name, 1, name) for name in regions if name != "a"}
    ledger.sums.model_bytes = 3 * total_bytes
    for name in regions[1:]:
        ledger.add(_update(1, name))
        ledger.note(name, "a", has.get(name, 0))
    for sequence in range(1, 11):
        ledger.add(_update(sequence, total_bytes=total_bytes))
    return ledger


def _wanted(ledger: Ledger) -> tuple[str, list[int]] | None:
    wanted = ledger.sum_up()
    return (wanted[0].peer, [manifest.sequence for manifest in wanted[0].manifests]) if wanted else None


def test_nothing_is_summed_up_for_whom_the_link_reaches() -> None:
    assert _wanted(_sender()) is None


def test_what_piles_up_before_a_link_that_reaches_is_summed_up() -> None:
    ledger = _sender(total_bytes=1 << 20, c=10)
    ledger.sums.tried("c", _update(10))
    ledger.sums.tried("b", _update(2))
    assert ledger.sum_up(backlogs=False) == ()
    assert _wanted(ledger) == ("b", [*range(3, 11)])


def test_a_link_that_has_carried_most_of_it_gets_the_rest_as_it_is() -> None:
    ledger = _sender(total_bytes=1 << 20, c=10)
    ledger.sums.tried("c", _update(10))
    ledger.sums.tried("b", _update(8))
    assert _wanted(ledger) is None


def test_a_pile_of_which_no_sum_could_be_made_is_not_tried_again_before_the_link_carries_more() -> None:
    ledger = _sender(total_bytes=1 << 20)
    assert _wanted(ledger) == ("", [*range(1, 11)])
    ledger.sums.add("", None)
    assert _wanted(ledger) is None
    ledger.sums.tried("b", _update(1))
    ledger.sums.tried("c", _update(1))
    assert _wanted(ledger) == ("", [*range(2, 11)])


def test_what_nobody_has_begun_to_get_is_summed_up_for_all() -> None:
    ledger = _sender()
    ledger.sums.tried("b", _update(2))
    ledger.sums.unreached("b")
    assert _wanted(ledger) == ("", [*range(3, 11)])


def test_what_all_others_have_is_summed_up_for_the_one_that_lacks_it() -> None:
    ledger = _sender(b=3, c=9)
    ledger.sums.tried("c", _update(10))
    ledger.sums.tried("b", _update(4))
    ledger.sums.unreached("b")
    assert _wanted(ledger) == ("b", [*range(5, 10)])


def test_what_two_lack_of_which_one_has_begun_to_get_it_is_not_summed_up() -> None:
    ledger = _sender(b=3, c=3)
    ledger.sums.tried("c", _update(10))
    ledger.sums.tried("b", _update(3))
    ledger.sums.unreached("b")
    assert _wanted(ledger) is None


def test_a_sum_counts_only_if_nothing_of_it_was_tried_while_it_was_made() -> None:
    ledger = _sender()
    ledger.sums.unreached("b")
    ledger.sum_up()
    ledger.sums.tried("c", _update(1))
    made = _update(10, first=1)
    ledger.sums.add("", made)
    assert [m.first for ship in ledger.ships(1) for m in ship.manifests] == [0] * 20
    assert ledger.sums.forget(ledger.has) == (made.digest,)


def test_a_sum_that_was_begun_is_not_replaced() -> None:
    ledger = _sender()
    ledger.sums.unreached("b")
    ledger.sum_up()
    ledger.sums.add("", _update(10, first=1))
    ledger.sums.tried("b", _update(10, first=1))
    for sequence in range(11, 16):
        ledger.add(_update(sequence))
    assert _wanted(ledger) == ("", [*range(11, 16)])
    ledger.sums.add("", _update(15, first=11))
    for ship in ledger.ships(1):
        assert [(m.first, m.sequence) for m in ship.manifests] == [(1, 10), (11, 15)]


def test_a_sum_grows_with_what_comes() -> None:
    ledger = _sender()
    ledger.sums.unreached("b")
    ledger.sum_up()
    ledger.sums.add("", first := _update(10, first=1))
    ledger.add(_update(11))
    assert _wanted(ledger) is None
    ledger.add(_update(12))
    assert _wanted(ledger) == ("", [10, 11, 12])
    ledger.sums.add("", _update(12, first=1, digest="more"))
    assert ledger.sums.forget(ledger.has) == (first.digest,)


def test_a_sum_that_is_no_smaller_is_not_sent_and_a_larger_one_is_waited_for() -> None:
    ledger = _sender()
    ledger.sums.unreached("b")
    assert _wanted(ledger) == ("", [*range(1, 11)])
    ledger.sums.add("", replace(_update(10, first=1), total_bytes=10))
    assert [m.first for ship in ledger.ships(1) for m in ship.manifests] == [0] * 20
    assert ledger.sums.forget(ledger.has) == ("a1-10",)
    assert _wanted(ledger) is None
    ledger.add(_update(11))
    assert _wanted(ledger) == ("", [*range(1, 12)])


@pytest.mark.parametrize(("model_bytes", "worth"), [(9, True), (40, False), (39, True)])
def test_a_sum_is_made_where_it_is_likely_to_be_smaller(model_bytes: int, worth: bool) -> None:
    """Of ten updates of a byte: twice a byte, but a quarter of the model at least."""
    ledger = _sender()
    ledger.sums.model_bytes = model_bytes
    ledger.sums.unreached("b")
    assert (_wanted(ledger) is not None) is worth


# What a receiver takes


def _receiver() -> Background:
    setup = Setup("b", ("a", "b"), 1, 40, 1, 0, background=True, sums=True)
    machine = Background(setup, Recovered(sequence=5, version=5, marks=(("a", 5),), model_bytes=3))
    machine.handle(UpdateStored(_update(6)))
    return machine


@pytest.mark.parametrize(
    ("first", "last", "verdict"),
    [(7, 9, Verdict.WANT), (6, 9, Verdict.LATER), (8, 9, Verdict.LATER), (3, 6, Verdict.HAVE), (2, 4, Verdict.HAVE)],
)
def test_a_sum_is_wanted_only_where_it_follows_on_what_is_here(first: int, last: int, verdict: Verdict) -> None:
    assert _receiver().verdict(_update(last, first=first)) is verdict


def test_of_a_sum_that_is_here_no_part_is_wanted() -> None:
    machine = _receiver()
    machine.handle(UpdateStored(_update(9, first=7)))
    assert [machine.verdict(_update(n)) for n in (7, 9, 10)] == [Verdict.HAVE, Verdict.HAVE, Verdict.WANT]
    assert machine.ledger.newest("a") == 9


def test_a_sum_of_which_a_part_came_meanwhile_counts_for_nothing() -> None:
    machine = _receiver()
    machine.handle(UpdateStored(_update(7)))
    machine.handle(UpdateStored(_update(9, first=7)))
    assert machine.ledger.newest("a") == 7
    assert machine.verdict(_update(9)) is Verdict.WANT


def test_where_the_age_of_updates_counts_sums_are_not_taken() -> None:
    setup = Setup("b", ("a", "b"), 1, 40, 1, 0, background=True)
    machine = Background(setup, Recovered(sequence=5, version=5, marks=(("a", 5),)))
    assert machine.verdict(_update(9, first=6)) is Verdict.LATER


# Where its bytes lie


@pytest.mark.processes
def test_a_disk_without_room_for_a_sum_costs_no_more_than_the_sum(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", bytes_=1 << 17) as folder:
        setup = Setup("a", ("a", "b"), 1, 8, 1, 0, background=True, sums=True)
        storage, layout = Storage(folder / "ps", setup), Layout((Slot("w", (8192,), "float32"),), 1)
        storage.keep_layout(layout)
        executor = ActionExecutor(
            setup, storage, FileChannel(tmp_path / "channel"), policy_of("ma"), codec_named("fp32")
        )
        executor.replica = Replica(
            policy_of("ma"), ExchangeSettings(background=1.0), codec_named("fp32"),
            ReplicaState(np.zeros(8192, np.float32), np.zeros(8192, np.float32)),
        )  # fmt: skip
        manifests, changes = [], np.random.default_rng(0).normal(size=(3, 8192)).astype(np.float32)
        for sequence in (1, 2):
            pieces = framing.encode(
                codec_named("fp32").encode(changes[sequence]),
                {"sequence": sequence, "weight": 1.0, "codec": codec_named("fp32").mark},
            )
            total, digest = sum(piece.nbytes for piece in pieces), framing.digest_of(pieces)
            manifests.append(Manifest("a", 1, sequence, digest, total, 1.0))
            storage.write_update(sequence, pieces, total)
            storage.keep_update(manifests[-1])
        made = executor.do(SumUp("b", tuple(manifests)), 1)
        assert isinstance(made, Summed)
        assert made.manifest is not None
        assert (made.manifest.begins, made.manifest.sequence, made.manifest.rounds) == (1, 2, 2)
        summed = framing.decode(storage.update(made.manifest))
        np.testing.assert_array_equal(
            codec_by_mark(int(summed.facts["codec"])).decode(summed.tensors, 8192), changes[1] + changes[2]
        )
        again = Manifest("a", 1, 2, manifests[1].digest, manifests[1].total_bytes, 2.0)
        for _ in range(2):
            # Without an answer no other is asked for.
            assert executor.do(SumUp("", (manifests[0], again)), 1) is None
        assert [path.suffix for path in (folder / "ps" / "sums").iterdir()] == [".frame"]
        storage.forget({}, [made.manifest.digest])
        assert not [*(folder / "ps" / "sums").iterdir()]
