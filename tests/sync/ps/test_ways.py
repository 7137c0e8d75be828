"""Ways of updates that change while the job runs: whenever that happens, every update counts once everywhere."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from support.budget import budget
from support.federation_in_miniature import Miniature, around

from sync.file_transfer.manifest import Manifest, PeerAddress
from sync.ps.core.events import PeerHas
from sync.ps.core.ledger import Ledger
from tests.sync.ps.test_machine import AnythingMayHappen

_NUMBERS = st.integers(0, 1 << 16)
_KINDS = ("mesh", "star", "chain", "other star")


class WaysChange(AnythingMayHappen):
    """The same while the control plane chooses other ways at any moment, and links are cut for good."""

    @initialize(
        regions=st.integers(3, 4),
        rounds=st.integers(1, 4),
        quorum=st.sampled_from([None, None, 0, 0, 2]),
        first=st.sampled_from(_KINDS),
    )
    def begin(self, regions: int, rounds: int, quorum: int | None, first: str) -> None:
        self.all = Miniature(
            regions, 1, rounds, 1, 0, quorum=quorum, max_rounds_ahead=1, neighbours=_ways(first, regions), rerouted=True
        )

    @rule(kind=st.sampled_from([*_KINDS, "around"]))
    def the_control_plane_chooses_other_ways(self, kind: str) -> None:
        names = sorted(self.all.sites)
        self.all.reroute(around(names, self.all.cut) if kind == "around" else _ways(kind, len(names)))

    @rule(site=_NUMBERS)
    def an_agent_hears_of_the_ways(self, site: int) -> None:
        self.all.tell_ways(self._site(site).name)

    @rule()
    def all_agents_hear_of_the_ways(self) -> None:
        for _ in range(2):
            for name in self.all.sites:
                self.all.tell_ways(name)

    @rule(site=_NUMBERS)
    def an_agent_hears_nothing_any_more(self, site: int) -> None:
        self.all.deaf = self._site(site).name

    @rule(a=_NUMBERS, b=_NUMBERS)
    def a_link_is_cut_for_good(self, a: int, b: int) -> None:
        """One at most: what is left then still joins all."""
        ends = {self._site(a).name, self._site(b).name}
        if len(ends) == 2 and not self.all.cut:
            self.all.cut.add(frozenset(ends))


def _ways(kind: str, regions: int) -> tuple[tuple[str, str], ...]:
    last = regions - 1
    pairs = {
        "mesh": [],
        "star": [(0, other) for other in range(1, regions)],
        "other star": [(other, last) for other in range(last)],
        "chain": [(here, here + 1) for here in range(last)],
    }
    return tuple((f"r{a}", f"r{b}") for a, b in pairs[kind])


TestWaysChange = WaysChange.TestCase
TestWaysChange.settings = settings(
    max_examples=budget(100), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), list(permutations(_KINDS, 2)))
@pytest.mark.parametrize("deaf", range(4))
def test_a_region_that_never_hears_of_the_new_ways_holds_nobody_up(before: str, after: str, deaf: int) -> None:
    federation = Miniature(4, 1, 3, 1, 0, neighbours=_ways(before, 4), rerouted=True)
    for name in federation.sites:
        federation.tell_ways(name)
    federation.deaf = f"r{deaf}"
    federation.reroute(_ways(after, 4))
    federation.finish()
    assert federation.ways.former, "the former ways stay in force"


@pytest.mark.parametrize(("before", "after"), list(permutations(_KINDS, 2)))
def test_once_all_know_the_new_ways_the_former_ones_are_over(before: str, after: str) -> None:
    federation = Miniature(4, 1, 3, 1, 0, neighbours=_ways(before, 4), rerouted=True)
    federation.reroute(_ways(after, 4))
    federation.finish()
    assert federation.ways.routes == 2
    assert {site.machine.ledger.former for site in federation.sites.values() if site.machine} == {()}


def _ledger(*, rerouted: bool) -> Ledger:
    ledger = Ledger("b", ("a", "b", "c"), [], dict.fromkeys("abc", 0), rerouted=rerouted)
    ledger.peers = {name: PeerAddress(name, 1, name) for name in "ac"}
    return ledger


def _update(region: str, sequence: int, **more: object) -> Manifest:
    return Manifest(region, 1, sequence, f"{region}{sequence}", 1, 1.0, **more)  # type: ignore[arg-type]


def test_what_others_may_lack_is_kept_where_ways_may_change() -> None:
    """In a mesh nobody passes on; the hub that a region becomes must have what it then is to pass on."""
    for rerouted in (False, True):
        ledger = _ledger(rerouted=rerouted)
        ledger.add(_update("a", 1))
        ledger.marks["a"] = 5
        assert dict(ledger.forgettable(margin=1))["a"] == (-1 if rerouted else 4)
        ledger.route((("a", "b"), ("b", "c")), 1)
        passed_on = [(ship.peer.region, len(ship.manifests)) for ship in ledger.ships(1) if ship.manifests]
        assert passed_on == ([("c", 1)] if rerouted else [])


def test_the_origin_says_what_is_everywhere() -> None:
    origin, other = Ledger("a", ("a", "b", "c"), [_update("a", 7)], {"a": 7}, rerouted=True), _ledger(rerouted=True)
    origin.peers = {name: PeerAddress(name, 1, name) for name in "bc"}
    origin.note("b", "a", 6)
    origin.note("c", "a", 4)
    (told,) = {manifest for ship in origin.ships(1) for manifest in ship.manifests}
    assert told.settled == 5
    other.marks["a"] = 6
    other.add(told)
    assert dict(other.forgettable(margin=1))["a"] == 4


def test_older_ways_that_come_late_count_for_nothing() -> None:
    ledger = _ledger(rerouted=True)
    ledger.route((("a", "c"), ("b", "c")), 3)
    ledger.route((("a", "b"), ("b", "c")), 2, (("a", "c"),))
    assert (ledger.neighbours, ledger.routes, ledger.former) == ((("a", "c"), ("b", "c")), 3, ())


def test_nothing_more_goes_over_a_link_that_is_given_up() -> None:
    federation = Miniature(3, 1, 2, 1, 0, neighbours=_ways("star", 3), rerouted=True)
    hub = federation.sites["r0"]
    federation.configure("r0")
    hub.let_work(0)
    hub.do_work()
    assert set(hub.peer_senders["r2"]) == {(0, "r0")}
    federation.reroute(_ways("chain", 3))
    for _ in range(2):
        for name in federation.sites:
            federation.tell_ways(name)
    assert hub.peer_senders["r2"] == {}
    assert set(hub.peer_senders["r1"]) == {(0, "r0")}
    hub.feed(PeerHas("r1", 0, "r0"))
    assert hub.peer_senders["r2"] == {}


def test_a_relay_that_has_come_back_forgets_nothing_before_it_knows_the_ways() -> None:
    """It may merge at once what it has; whom it passes that on to, its agent tells it later."""
    ledger = Ledger("b", ("a", "b", "c"), [_update("a", 3), _update("a", 4)], {"a": 4, "b": 4, "c": 4})
    assert {up_to for _, up_to in ledger.forgettable(margin=1)} == {-1}
    ledger.peers = {name: PeerAddress(name, 1, name) for name in "ac"}
    ledger.route((("a", "b"), ("b", "c")))
    assert dict(ledger.forgettable(margin=1))["a"] == -1
    assert [manifest.sequence for ship in ledger.ships(1) for manifest in ship.manifests] == [3, 4]
