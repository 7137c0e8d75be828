"""The mask keys of a job with secure aggregation: each region makes one, signs it with the key of its certificate, and
tells it to its neighbours, which pass on all that they know."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

import grpc
import grpc.aio

from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc
from sync.file_transfer.signing import signature_of, verify_signature
from sync.file_transfer.wire import open_channel
from sync.ps.config import PsConfig
from sync.ps.core.events import MaskKeyKnown, PeerMisbehaved
from sync.ps.engine import Engine
from sync.ps.execution.mask_file import MaskFile
from sync.secure import PairMasks
from sync.tcp_streams.sockets import Tls

__all__ = ["MaskKeys", "terms_of"]

_log = logging.getLogger("geofed.ps")
_RETRY_SECONDS = 0.5
"""Pause before the neighbours are asked again."""
_CALL_TIMEOUT_SECONDS = 20.0
"""Longest time of one call to a neighbour."""
_OTHERS = "mask-keys.json"
"""File of the other regions' public keys."""


@dataclass(frozen=True)
class _Signed:
    """A public key as its region has signed it; bytes in hex."""

    key: str
    terms: str
    signature: str
    certificate: str


def terms_of(shares: Mapping[str, float], codec: str, settings: Mapping[str, float]) -> str:
    """Return what the regions of a job must agree on, as text that each signs with its key."""
    # Regions that add less noise than another one expects would leave it with less than its agent has booked.
    noise = [settings.get(name) for name in ("noise", "clip", "sampled")] if settings.get("noise") else []
    every = [{region: shares[region].hex() for region in sorted(shares)}, codec, settings.get("secure"), *noise]
    return json.dumps(every, separators=(",", ":"))


class MaskKeys:
    """The keys that this region knows. They never change: with another key a region could send a second update of a
    round under other masks."""

    def __init__(self, engine: Engine, config: PsConfig, identity: Callable[[], Tls]) -> None:
        """Raises ``GeofedError("STATE_INVALID")`` if this region has lost its state or its key."""
        self._engine, self._config, self._identity = engine, config, identity
        self._file = config.state_dir / _OTHERS
        self._terms = terms_of(config.shares, config.codec, config.wan_settings)
        machine = engine.machine
        own = [sequence for region, sequence in machine.ledger.kept if region == config.region]
        file = MaskFile(config.state_dir, max(0, machine.sequence, *own), lost=machine.state_lost)
        self._key, engine.executor.own_updates.mask_file = file.key, file
        self._told: set[str] = set()
        """Neighbours that know the keys of all regions."""
        self._refused: set[str] = set()
        """Neighbours whose keys were refused, and are said to be."""
        self._known: dict[str, _Signed] = {}
        if self._file.exists():
            self._known = {region: _Signed(**one) for region, one in json.loads(self._file.read_text()).items()}
        self._complete()

    def _statement(self, region: str, key: str, terms: str) -> bytes:
        return json.dumps(["geofed mask key 1", self._config.job, region, key, terms]).encode()

    @property
    def _others(self) -> set[str]:
        return {*self._config.regions} - {self._config.region}

    def message(self) -> sync_pb2.MaskKeys:
        """Return all keys that this region knows, including its own."""
        region, tls, public = self._config.region, self._identity(), self._key.public
        signature = signature_of(self._statement(region, public.hex(), self._terms), tls)
        own = sync_pb2.MaskKey(
            region=region, key=public, terms=self._terms, signature=signature, certificate_pem=tls.certificate_pem
        )
        rest = [
            sync_pb2.MaskKey(
                region=name,
                key=bytes.fromhex(one.key),
                terms=one.terms,
                signature=bytes.fromhex(one.signature),
                certificate_pem=one.certificate.encode(),
            )
            for name, one in sorted(self._known.items())
        ]
        return sync_pb2.MaskKeys(job=self._config.job, keys=[own, *rest])

    async def exchanged(self, caller: str, request: sync_pb2.MaskKeys) -> sync_pb2.MaskKeys:
        """Take what another region knows, and return what this one knows."""
        self._take(request.keys)
        self._note(caller, request)
        return self.message()

    def _take(self, keys: Iterable[sync_pb2.MaskKey]) -> None:
        """Add keys that are not known yet. Raises ``GeofedError("FORBIDDEN")`` for one that its region has not
        signed."""
        fresh: dict[str, _Signed] = {}
        for proto in list(keys)[: len(self._config.regions)]:
            if proto.region not in self._others:
                continue
            told = _Signed(
                proto.key.hex(),
                proto.terms,
                proto.signature.hex(),
                proto.certificate_pem.decode("ascii", errors="replace"),
            )
            known = self._known.get(proto.region)
            if known is not None and (known.key, known.terms) == (told.key, told.terms):
                continue
            text = self._statement(proto.region, told.key, told.terms)
            verify_signature(
                text, proto.signature, proto.certificate_pem, proto.region, self._identity(), "the mask key"
            )
            taken = {region: one.key for region, one in (self._known | fresh).items() if region != proto.region}
            taken[self._config.region] = self._key.public.hex()
            same = next((region for region, key in taken.items() if key == told.key), "")
            what = ""
            if known is not None:
                what = "has announced two mask keys"
            elif told.terms != self._terms:
                what = f"takes part under other terms: {clean(told.terms, 400)}, not {self._terms}"
            elif same:
                what = f"has announced the mask key of {same}"
            if what:
                self._engine.feed(PeerMisbehaved(proto.region, f"{proto.region} {what}"))
                return
            fresh[proto.region] = told
        if fresh:
            self._known |= fresh
            kept = {region: asdict(one) for region, one in sorted(self._known.items())}
            write_durably(self._file, [json.dumps(kept).encode()])
            self._complete()

    def _complete(self) -> None:
        """Once all keys are known, derive the masks, and tell the state machine."""
        if self._others <= self._known.keys():
            terms = f"{self._config.job}\0{self._terms}"
            own = self._config.region
            secrets = {
                other: self._key.secret(own, other, bytes.fromhex(one.key), terms) for other, one in self._known.items()
            }
            self._engine.executor.own_updates.masks = PairMasks(own, secrets)
        for region in sorted(self._known):
            self._engine.feed(MaskKeyKnown(region))

    async def exchange(self) -> None:
        """Call the neighbours until they and this region know all keys. A region that cannot be called calls."""
        ledger, version = self._engine.machine.ledger, -1
        while not self._others <= ledger.peers.keys():
            version = await self._engine.changed_since(version)
        while not (self._others <= self._known.keys() and self._neighbours() <= self._told):
            # All at once: one that does not answer delays no other.
            await asyncio.gather(*(self._call(region) for region in sorted(self._neighbours() - self._told)))
            if not (self._others <= self._known.keys() and self._neighbours() <= self._told):
                await asyncio.sleep(_RETRY_SECONDS)

    def _neighbours(self) -> set[str]:
        """Return the regions with which this one exchanges directly."""
        ledger, own = self._engine.machine.ledger, self._config.region
        pairs = [*ledger.neighbours, *ledger.former]
        near = {a if b == own else b for a, b in pairs if own in (a, b)} if ledger.neighbours else self._others
        return near & ledger.peers.keys()

    async def _call(self, region: str) -> None:
        """Exchange keys with a neighbour, if it answers."""
        try:
            async with open_channel(self._engine.machine.ledger.peers[region], self._identity()) as channel:
                stub = sync_pb2_grpc.ExchangeStub(channel)
                reply: sync_pb2.MaskKeys = await stub.ExchangeKeys(self.message(), timeout=_CALL_TIMEOUT_SECONDS)
            self._take(reply.keys)
            self._note(region, reply)
        except grpc.RpcError:
            return
        except GeofedError as error:
            if region not in self._refused:
                self._refused.add(region)
                _log.warning("mask keys of %s are refused: %s", region, error)

    def _note(self, region: str, message: sync_pb2.MaskKeys) -> None:
        """Record that a region knows the keys of all, if it has just told them all."""
        if {key.region for key in message.keys} >= {*self._config.regions}:
            self._told.add(region)
