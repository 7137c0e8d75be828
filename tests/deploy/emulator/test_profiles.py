from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.emulator import CONTROL, EmulatedLink, WanProfile, load_profile, profile_names
from deploy.emulator._link import change
from deploy.emulator._schema import parse_profile
from deploy.emulator._topology import netem_lines, queue_bytes, rate_line, segment_bytes
from geofed_pb.errors import GeofedError

HEAD = "name: x\ndescription: d\nsource: s\nregions: [a, b]\n"


def links(low_delay: float = 0) -> st.SearchStrategy[EmulatedLink]:
    delays = st.floats(low_delay, 60_000)
    return delays.flatmap(
        lambda delay: st.builds(
            EmulatedLink,
            rate_mbps=st.none() | st.floats(0.01, 100_000),
            delay_ms=st.just(delay),
            jitter_ms=st.floats(0, delay),
            loss=st.floats(0, 1),
        )
    )


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profile_covers_every_ordered_pair(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert set(profile.links) == {(a, b) for a in profile.sites for b in profile.sites if a != b}
    assert all(not profile.links[CONTROL, region].shaped for region in profile.regions)
    assert profile.source


def test_shipped_names() -> None:
    assert profile_names() == ["china-eu-us-3", "lan", "multicloud-7", "seed-2"]


def test_round_trip_is_split_over_the_two_directions() -> None:
    profile = load_profile("seed-2")
    assert profile.links["shanghai", "chongqing"] == EmulatedLink(rate_mbps=100, delay_ms=15)


def test_the_measured_grid_is_asymmetric_and_scaled_by_200() -> None:
    profile = load_profile("multicloud-7")
    there = profile.links["azure-japaneast", "aws-us-east-1"]
    back = profile.links["aws-us-east-1", "azure-japaneast"]
    assert (there.rate_mbps, back.rate_mbps) == (11.96, 25.85)
    assert there.delay_ms == pytest.approx(81, abs=1)


@given(link=links())
def test_profile_survives_json(link: EmulatedLink) -> None:
    profile = WanProfile("p", "d", "s", ("a",), {(CONTROL, "a"): link, ("a", CONTROL): EmulatedLink()})
    assert WanProfile.from_dict(json.loads(json.dumps(profile.as_dict()))) == profile


@given(link=links())
def test_tc_lines_are_in_range_for_every_link(link: EmulatedLink) -> None:
    assert 512 << 10 <= queue_bytes(link) <= 256 << 20
    assert segment_bytes([link]) in (16_384, 65_536)
    line = rate_line(0, 1, link)
    assert int(line.split("rate ")[1].split("bit")[0]) >= 10_000
    assert "e-" not in netem_lines(0, 1, link)[0]


@pytest.mark.parametrize(
    ("rest", "line", "words"),
    [
        ("links:\n  - {between: [a, b], rate: 3}\n", 6, "unknown key `rate` in links.0; did you mean `rate_mbps`?"),
        ("links:\n  - {between: [a, c]}\n", 6, "'c' is not a region of this profile"),
        ("links:\n  - {between: [a, b]}\n  - {from: a, to: b}\n", 7, "given twice"),
        ("links:\n  - {from: a}\n", 6, "name the ends"),
        ("links:\n  - {from: a, to: a}\n", 6, "two different sites"),
        ("links:\n  - {from: a, to: b}\n", 6, "nothing about b to a"),
        ("links:\n  - {between: [a, b], rtt_ms: 3, delay_ms: 2}\n", 6, "not both"),
        ("default: {delay_ms: 3, jitter_ms: 4}\n", 5, "jitter_ms must be"),
        ("default: {loss: 1.5}\n", 5, "default.loss"),
        ("default: {rate_mbps: fast}\n", 5, "default.rate_mbps"),
        ("regions_too: 1\ndefault: {}\n", 5, "regions_too"),
    ],
)
def test_error_names_file_line_and_key(rest: str, line: int, words: str) -> None:
    with pytest.raises(GeofedError) as caught:
        parse_profile(HEAD + rest, "wan.yaml")
    assert caught.value.code == "CONFIG_INVALID"
    assert caught.value.message.startswith(f"wan.yaml:{line}:")
    assert words in caught.value.message


@pytest.mark.parametrize("text", ["", "- a\n", "name: [\n", "name: x\n"])
def test_other_documents_are_refused(text: str) -> None:
    with pytest.raises(GeofedError, match="CONFIG_INVALID"):
        parse_profile(text, "wan.yaml")


def test_links_of_the_control_plane_may_be_shaped() -> None:
    text = HEAD + "default: {}\nlinks:\n  - {between: [control, a], rtt_ms: 10}\n"
    assert parse_profile(text, "f").links[CONTROL, "a"].delay_ms == 5


def test_missing_profiles(tmp_path: Path) -> None:
    with pytest.raises(GeofedError, match="shipped are"):
        load_profile("nowhere")
    with pytest.raises(GeofedError, match="No such file"):
        load_profile(tmp_path / "none.yaml")


def test_change_keeps_the_rest_and_refuses_nonsense() -> None:
    link = EmulatedLink(rate_mbps=10, delay_ms=20)
    assert change(link, rate_mbps=None) == EmulatedLink(delay_ms=20)
    with pytest.raises(GeofedError, match="CONFIG_INVALID"):
        change(link, loss=2)
    with pytest.raises(GeofedError, match="CONFIG_INVALID"):
        change(link, speed=2)
