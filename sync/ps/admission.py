"""Which manifests a parameter server accepts from its peers: signed by their region, possible, and never two different
ones under one number."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably
from geofed_pb.v1 import sync_pb2
from sync.codec import codec_named
from sync.file_transfer.file_receiver import MAX_UPDATE_BYTES
from sync.file_transfer.manifest import Manifest
from sync.file_transfer.signing import verify
from sync.file_transfer.wire import manifest_of
from sync.ps.config import PsConfig
from sync.ps.core.events import Event, PeerMisbehaved
from sync.ps.manifest_limits import ManifestLimits
from sync.tcp_streams.sockets import Tls

__all__ = ["MAX_WITNESSES", "Admission", "PeerFault"]

MAX_WITNESSES = 8
"""Manifests of other regions' updates that a manifest carries at most."""
_MAX_FAULTS = 100
"""Kinds of faults that are counted; there are a few for each region."""
_FAULT_TEXT_BYTES = 400
"""Longest text of a fault."""
_SUM_FACTOR = 1.02
"""Size of a sum of updates (`sync.codec.Exact`), as a multiple of the model in float32."""
_SIGNIFICANT_FACTOR = 2.0
"""The same for an update of which only significant coordinates are sent (`sync.codec.Sparse`)."""
_MASKED_FACTOR = 2.01
"""The same for a masked update, of a model that gradients hardly train: its state has 64 bits (`sync.secure`)."""


@dataclass
class PeerFault:
    """Messages that were refused."""

    text: str
    count: int = 0


class Admission:
    """Checks every manifest at the boundary, and counts what was refused, by region and code."""

    def __init__(self, config: PsConfig, identity: Callable[[], Tls], feed: Callable[[Event], None]) -> None:
        self._config, self._identity, self._feed = config, identity, feed
        factor = max(codec_named(config.codec).size_factor, _SUM_FACTOR)
        if config.wan_settings.get("significance"):
            factor = max(factor, _SIGNIFICANT_FACTOR)
        if config.wan_settings.get("secure"):
            factor = max(factor, _MASKED_FACTOR)
        background = bool(config.wan_settings.get("background"))
        samples = config.round_samples
        self.limits = ManifestLimits(config.regions, config.rounds, factor, MAX_UPDATE_BYTES, samples, background)
        self.unsigned: frozenset[str] = frozenset()
        """Regions of a version that signs nothing, as the control plane says."""
        self.faults: dict[tuple[str, str], PeerFault] = {}
        """What was refused, by region and code."""

    def note(self, region: str, error: GeofedError) -> None:
        """Count a refused message."""
        fault = self.faults.get((region, error.code))
        if fault is None and len(self.faults) < _MAX_FAULTS:
            fault = self.faults[region, error.code] = PeerFault("")
        if fault is not None:
            fault.text, fault.count = clean(error.message, _FAULT_TEXT_BYTES), fault.count + 1

    def checked(
        self, proto: sync_pb2.UpdateManifest, caller: str, most_bytes: int, known: Callable[[Manifest], Manifest | None]
    ) -> Manifest:
        """Return the manifest of an offer.

        ``known`` returns the manifest that is here under the same number. Raises ``GeofedError``: FORBIDDEN if it is
        not signed by its region, what `ManifestLimits.check` raises, or PEER_INVALID for a second update of one number.
        """
        config = self._config
        if proto.job != config.job or proto.region not in config.regions or proto.region == config.region:
            raise GeofedError("FORBIDDEN", f"{caller} may not send updates of {clean(proto.region, 64)}")
        signed = self._is_signed(proto, caller)
        manifest = manifest_of(proto)
        try:
            self.limits.check(manifest, most_bytes)
        except GeofedError as error:
            if signed or caller == proto.region:
                self.blame(manifest, error.message)
            raise
        if not signed:
            return replace(manifest, signature="", certificate="")
        self._compare(manifest, known(manifest))
        for other in proto.merged[:MAX_WITNESSES]:
            self._compare_witness(other, known)
        return manifest

    def signed_only(self, region: str, reply: sync_pb2.RejoinReply) -> sync_pb2.RejoinReply:
        """Return the reply of a region without updates that are not signed by the regions that have made them."""
        found = sync_pb2.RejoinReply()
        found.CopyFrom(reply)
        del found.kept[:]
        for proto in reply.kept:
            try:
                self._is_signed(proto, region)
                self.limits.check(manifest_of(proto), self.limits.most_bytes)
            except GeofedError as error:
                self.note(region, error)
            else:
                found.kept.append(proto)
        return found

    def _is_signed(self, proto: sync_pb2.UpdateManifest, caller: str) -> bool:
        if not proto.signature and {proto.region, caller} & self.unsigned:
            return False
        verify(proto, self._identity())
        return True

    def _compare_witness(self, proto: sync_pb2.UpdateManifest, known: Callable[[Manifest], Manifest | None]) -> None:
        """Compare the update that another region has merged with the one that is here under the same number."""
        if proto.job != self._config.job or proto.region == self._config.region:
            return
        other = manifest_of(proto)
        held = known(other)
        if held is None or not held.certificate or held.content == other.content:
            return
        try:
            verify(proto, self._identity(), certificate_pem=held.certificate.encode())
        except GeofedError:
            # It proves nothing: the sender may have made it up.
            return
        self._compare(other, held)

    def _compare(self, manifest: Manifest, held: Manifest | None) -> None:
        """Raise ``GeofedError("PEER_INVALID")`` if a region has signed two different updates of one number."""
        if held is None or not held.signature or held.epoch != manifest.epoch or held.content == manifest.content:
            return
        path = self._config.state_dir / "evidence" / f"{manifest.region}-{manifest.sequence}.json"
        _keep(path, {"job": self._config.job, "manifests": [asdict(held), asdict(manifest)]})
        what = f"two different updates of round {manifest.sequence}; regions may have merged either"
        text = f"{manifest.region} has made {what}: {path}"
        self.blame(manifest, text)
        raise GeofedError("PEER_INVALID", text)

    def blame(self, manifest: Manifest, text: str) -> None:
        """Report that a region has sent what no region may send: its update of this round can never be merged."""
        self._feed(PeerMisbehaved(manifest.region, text))


def _keep(path: Path, content: object) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, [json.dumps(content, indent=1).encode()])
