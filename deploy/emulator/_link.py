"""Links and profiles: the shape of one directed pair of sites, and the profile with all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from geofed_pb.errors import GeofedError

CONTROL = "control"
"""The site of the control plane. It is not a region; its links are unshaped unless a profile shapes them."""

MTU_BYTES = 1500
"""Largest IP packet on a link in bytes, as on Ethernet and most of the Internet; loss and jitter are drawn for each."""
FRAME_OVERHEAD_BYTES = 14
"""Bytes that the kernel's queues count in addition to the IP packet: the Ethernet header of a veth device."""

Pair = tuple[str, str]
"""A directed link: (source site, destination site)."""


@dataclass(frozen=True)
class EmulatedLink:
    """The shape of one direction between two sites."""

    rate_mbps: float | None = None
    """Rate of IP packets, headers included, in 10^6 bit/s; None: as fast as the machine allows."""
    delay_ms: float = 0.0
    """One-way delay of every packet."""
    jitter_ms: float = 0.0
    """Half width of the uniform distribution around the delay, drawn per packet; packets may overtake."""
    loss: float = 0.0
    """Probability that a packet is lost, drawn per packet, in [0, 1]."""

    def __post_init__(self) -> None:
        if self.rate_mbps is not None and not 0.01 <= self.rate_mbps <= 100_000:
            raise ValueError(f"rate_mbps must be between 0.01 and 100000, not {self.rate_mbps}")
        if not 0 <= self.delay_ms <= 60_000:
            raise ValueError(f"delay_ms must be between 0 and 60000, not {self.delay_ms}")
        if not 0 <= self.jitter_ms <= self.delay_ms:
            raise ValueError(f"jitter_ms must be between 0 and the delay ({self.delay_ms}), not {self.jitter_ms}")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss must be a fraction between 0 and 1, not {self.loss}")

    @property
    def held(self) -> bool:
        """Whether packets are delayed, or dropped at random, before the rate limit."""
        return self.delay_ms > 0 or self.loss > 0

    @property
    def drawn(self) -> bool:
        """Whether jitter or loss is drawn per packet, so that packets may not be sent as segments of 64 KB."""
        return self.jitter_ms > 0 or self.loss > 0

    @property
    def shaped(self) -> bool:
        """Whether the link has a delay, jitter, loss or a rate."""
        return self.held or self.rate_mbps is not None


@dataclass(frozen=True)
class WanProfile:
    """A whole WAN: its regions and a link for every ordered pair of sites."""

    name: str
    """Name of the profile, which every result contains."""
    description: str
    """Description in one sentence."""
    source: str
    """Source of its figures."""
    regions: tuple[str, ...]
    """Region names, in order, without the site ``control``."""
    links: Mapping[Pair, EmulatedLink]
    """One link for each ordered pair of distinct sites, ``control`` included."""

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of all sites: the control plane's, then the regions."""
        return (CONTROL, *self.regions)

    def as_dict(self) -> dict[str, object]:
        """Return the profile in plain types; ``Profile.from_dict(p.as_dict()) == p``."""
        links = [{"src": src, "dst": dst, **asdict(link)} for (src, dst), link in self.links.items()]
        return {
            "name": self.name,
            "description": self.description,
            "source": self.source,
            "regions": list(self.regions),
            "links": links,
        }

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> WanProfile:
        """Create a profile from the plain data that `as_dict` returns."""
        rows = data["links"]
        assert isinstance(rows, list)
        links = {
            (row["src"], row["dst"]): EmulatedLink(**{k: v for k, v in row.items() if k not in ("src", "dst")})
            for row in rows
        }
        regions = data["regions"]
        assert isinstance(regions, list)
        return WanProfile(
            name=str(data["name"]),
            description=str(data["description"]),
            source=str(data["source"]),
            regions=tuple(regions),
            links=links,
        )


def change(link: EmulatedLink, **fields: float | None) -> EmulatedLink:
    """Return the link with some fields replaced.

    Raises GeofedError CONFIG_INVALID if the result is not a valid link.
    """
    try:
        return replace(link, **fields)  # type: ignore[arg-type]  # names are checked by replace itself
    except (TypeError, ValueError) as error:
        raise GeofedError("CONFIG_INVALID", str(error), hint="see `geofed emulator set --help`") from error
