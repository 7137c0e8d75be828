"""Schema of profiles in YAML files, with errors that name the file, the line and the key."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deploy.emulator._link import CONTROL, EmulatedLink, Pair, WanProfile
from geofed_pb.errors import GeofedError
from geofed_pb.files import strict_yaml

SiteName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,47}$")]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Shape(_Closed):
    rate_mbps: float | None = Field(default=None, ge=0.01, le=100_000, description="rate of IP packets")
    rtt_ms: float | None = Field(default=None, ge=0, le=120_000, description="half of it is the one-way delay")
    delay_ms: float | None = Field(default=None, ge=0, le=60_000, description="one-way delay")
    jitter_ms: float = Field(default=0, ge=0, description="half width around the delay")
    loss: float = Field(default=0, ge=0, le=1, description="fraction of packets lost")

    @model_validator(mode="after")
    def _one_delay(self) -> _Shape:
        if self.rtt_ms is not None and self.delay_ms is not None:
            raise ValueError("give rtt_ms or delay_ms, not both")
        self.link()
        return self

    def link(self) -> EmulatedLink:
        delay = self.delay_ms if self.delay_ms is not None else (self.rtt_ms or 0) / 2
        return EmulatedLink(rate_mbps=self.rate_mbps, delay_ms=delay, jitter_ms=self.jitter_ms, loss=self.loss)


class _Row(_Shape):
    between: tuple[SiteName, SiteName] | None = Field(default=None, strict=False, description="both directions")
    src: SiteName | None = Field(default=None, alias="from", description="with `to`: one direction")
    dst: SiteName | None = Field(default=None, alias="to")

    @model_validator(mode="after")
    def _ends(self) -> _Row:
        directed = (self.src is not None, self.dst is not None)
        if (self.between is None) != all(directed) or any(directed) != all(directed):
            raise ValueError("name the ends: either `between: [a, b]` or `from: a` with `to: b`")
        if len(set(self.pairs()[0])) == 1:
            raise ValueError("a link joins two different sites")
        return self

    def pairs(self) -> list[Pair]:
        if self.between is not None:
            a, b = self.between
            return [(a, b), (b, a)]
        assert self.src is not None
        assert self.dst is not None
        return [(self.src, self.dst)]


class _ProfileFile(_Closed):
    name: SiteName
    description: str
    source: str = Field(description="where the figures come from")
    regions: list[SiteName] = Field(min_length=1, max_length=24)
    default: _Shape | None = Field(default=None, description="link of the region pairs that no row names")
    links: list[_Row] = Field(default_factory=list)

    def profile(self) -> WanProfile:
        """Build the profile. Raises ValueError with a text that starts with the invalid key and a colon."""
        if len(set(self.regions)) != len(self.regions) or CONTROL in self.regions:
            raise ValueError(f"regions: names must differ from each other and from {CONTROL!r}")
        sites = [CONTROL, *self.regions]
        named: dict[Pair, EmulatedLink] = {}
        for index, row in enumerate(self.links):
            for pair in row.pairs():
                unknown = set(pair) - set(sites)
                if unknown:
                    raise ValueError(f"links.{index}: {unknown.pop()!r} is not a region of this profile")
                if pair in named:
                    raise ValueError(f"links.{index}: {pair[0]} to {pair[1]} is given twice")
                named[pair] = row.link()
        links = {(a, b): self._link(named, (a, b)) for a in sites for b in sites if a != b}
        return WanProfile(self.name, self.description, self.source, tuple(self.regions), links)

    def _link(self, named: dict[Pair, EmulatedLink], pair: Pair) -> EmulatedLink:
        if pair in named:
            return named[pair]
        if CONTROL in pair:
            return EmulatedLink()
        if self.default is None:
            raise ValueError(f"links: nothing about {pair[0]} to {pair[1]}; add a row or a `default`")
        return self.default.link()


def load_profile(name_or_path: str | Path) -> WanProfile:
    """Load a shipped profile by name, or a file by path (a text with a slash, or that ends with .yaml or .yml).

    Raises GeofedError CONFIG_INVALID with the file, the line and the key at fault.
    """
    text = str(name_or_path)
    if "/" in text or text.endswith((".yaml", ".yml")):
        path = Path(text)
        try:
            return parse_profile(path.read_text(encoding="utf-8"), text)
        except OSError as error:
            raise GeofedError("CONFIG_INVALID", f"{text}: {error.strerror}") from error
    if text not in profile_names():
        raise GeofedError(
            "CONFIG_INVALID",
            f"no profile {text!r}; shipped are: {', '.join(profile_names())}",
            hint="name one of them, or give the path of a YAML file",
        )
    file = resources.files("deploy.emulator") / "profiles" / f"{text}.yaml"
    return parse_profile(file.read_text(encoding="utf-8"), f"{text}.yaml")


def profile_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    folder = resources.files("deploy.emulator") / "profiles"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def parse_profile(text: str, origin: str) -> WanProfile:
    """Parse the profile in a YAML text; ``origin`` is the file name that errors show."""
    try:
        document = strict_yaml.parse(text, origin)
        profile = strict_yaml.validate(_ProfileFile, document)
    except strict_yaml.InvalidYaml as error:
        raise GeofedError("CONFIG_INVALID", str(error)) from error
    try:
        return profile.profile()
    except ValueError as error:
        key, _, told = str(error).partition(": ")
        path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        raise GeofedError("CONFIG_INVALID", document.error(path, f"`{key}`: {told}")) from error
