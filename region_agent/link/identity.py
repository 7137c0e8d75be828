"""The region's key and certificate: created here, signed by the control plane, renewed after half of the lifetime."""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from geofed_pb.errors import CATALOGUE, GeofedError
from geofed_pb.files.durable import write_durably
from geofed_pb.rpc import read_pem, region_in, region_name
from region_agent.config import RegionConfig
from sync.tcp_streams.revoked import RevokedSerials
from sync.tcp_streams.sockets import Tls

__all__ = ["Identity", "Invitation", "make_request", "read_invitation"]

_PREFIX = "geofed1."
"""First characters of an invitation."""


@dataclass(frozen=True)
class Invitation:
    """Decoded invitation, as `geofed region invite` prints it."""

    address: str
    """host:port of the control port; several are separated by commas."""
    ca_pem: bytes
    """Certificate of the federation's authority, with which the first connection verifies the control plane."""
    region: str
    secret: str


def read_invitation(text: str) -> Invitation:
    """Decode an invitation; raises ``GeofedError("TOKEN_INVALID")``."""
    text = text.strip()
    try:
        if not text.startswith(_PREFIX):
            raise ValueError(f"it does not begin with {_PREFIX}")
        body = text.removeprefix(_PREFIX)
        raw = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        ca = x509.load_der_x509_certificate(base64.b64decode(raw["ca"]))
        pem = ca.public_bytes(serialization.Encoding.PEM)
        return Invitation(str(raw["address"]), pem, str(raw["region"]), str(raw["secret"]))
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise GeofedError("TOKEN_INVALID", f"not a valid invitation: {error}") from None


def make_request(region: str) -> tuple[bytes, bytes]:
    """Create a key and a signing request for it, both in PEM. The key stays on this machine."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, region)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return key_pem, request.public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True)
class JoinedFederation:
    """The federation that the region has joined."""

    region: str
    address: str
    """host:port of the agent port; of several control planes on one database, separated by commas."""
    federation: str


def region_of_certificate(certificate: x509.Certificate) -> str | None:
    """Return the region that a certificate is of; None: it is of none."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    return region_in(names.get_values_for_type(x509.DNSName))


class Identity:
    """The files in ``<state>/identity``."""

    def __init__(self, state_dir: Path, config: RegionConfig | None = None) -> None:
        """``config`` may name files of the operator's own CA, which are then used instead, and never written."""
        self.folder = state_dir / "identity"
        self.ca_file = self.folder / "ca.pem"
        self.certificate_file = self.folder / "certificate.pem"
        self.key_file = self.folder / "key.pem"
        self._given = config.identity if config is not None else None
        self._region = config.name if config is not None else ""
        if self._given is not None:
            self.ca_file, self.certificate_file = self._given.ca_file, self._given.certificate_file
            self.key_file = self._given.key_file
        self.revoked_file = self.folder / "revoked.json"
        """Serial numbers of revoked certificates, as the control plane has sent them last."""
        self.revoked = RevokedSerials(self.revoked_file)
        self._federation_file = self.folder / "federation.json"

    @property
    def joined(self) -> bool:
        """Whether the agent has joined a federation, or has the identity of the operator's own CA."""
        return self._given is not None or self._federation_file.exists()

    def store(self, federation: JoinedFederation, key_pem: bytes, certificate_pem: bytes, ca_pem: bytes) -> None:
        """Write the result of joining to the files."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(self.folder, 0o700)
        for path, content in (
            (self.ca_file, ca_pem),
            (self.key_file, key_pem),
            (self.certificate_file, certificate_pem),
            (self._federation_file, json.dumps(asdict(federation)).encode()),
        ):
            write_durably(path, [content], mode=0o600)

    def renew(self, certificate_pem: bytes, ca_pem: bytes) -> None:
        """Write a renewed certificate. The key stays the same, so an interruption leaves a consistent identity."""
        write_durably(self.ca_file, [ca_pem])
        write_durably(self.certificate_file, [certificate_pem])

    @property
    def federation(self) -> JoinedFederation:
        """The joined federation; raises ``GeofedError("UNAUTHENTICATED")`` if the region has not joined one."""
        if self._given is not None:
            return JoinedFederation(self._region, self._given.control_plane, "")
        try:
            return JoinedFederation(**json.loads(self._federation_file.read_text()))
        except FileNotFoundError:
            text = "this region has not joined a federation"
            hint = "get an invitation with `geofed region invite NAME`, then `geofed agent join`"
            raise GeofedError("UNAUTHENTICATED", text, hint=hint) from None

    @property
    def authority(self) -> bytes:
        """Public key of the federation's first authority, in DER."""
        certificate = x509.load_pem_x509_certificate(self.ca_file.read_bytes())
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return certificate.public_key().public_bytes(serialization.Encoding.DER, form)

    def tls(self) -> Tls:
        """Read the present key and certificate; the files change when the certificate is renewed."""
        pems = self.ca_file.read_bytes(), self.certificate_file.read_bytes(), self.key_file.read_bytes()
        return Tls(*pems, self.revoked)

    def trust(self, ca_pem: bytes) -> None:
        """Trust these CAs from now on. The operator's own file is left as it is."""
        if ca_pem and self._given is None and ca_pem != self.ca_file.read_bytes():
            write_durably(self.ca_file, [ca_pem], mode=0o600)

    def revoke(self, serials: Iterable[str]) -> None:
        """Keep the serial numbers of all revoked certificates, for all servers of this region."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if frozenset(serials) != self.revoked.serials:
            write_durably(self.revoked_file, [json.dumps(sorted(serials)).encode()], mode=0o600)

    @property
    def certificate(self) -> x509.Certificate:
        """The agent's certificate, read from its file."""
        return x509.load_pem_x509_certificate(self.certificate_file.read_bytes())

    def check(self) -> None:
        """Check the certificate's validity by this machine's clock.

        Raises ``GeofedError``: CERTIFICATE_EXPIRED; CERTIFICATE_INVALID if the validity has not begun; UNAUTHENTICATED.
        """
        self.federation  # noqa: B018 - raises if there is none
        for path in (self.ca_file, self.certificate_file, self.key_file):
            read_pem(path, "a file of the region's identity")
        if region_of_certificate(self.certificate) != self.federation.region:
            text = f"{self.certificate_file} is not a certificate of {region_name(self.federation.region)}"
            raise GeofedError("CERTIFICATE_INVALID", text)
        begins, ends, now = self.certificate.not_valid_before_utc, self.certificate.not_valid_after_utc, time.time()
        reads = f"this machine's clock says {time.strftime('%Y-%m-%d %H:%M', time.gmtime(now))} UTC"
        if ends.timestamp() < now:
            hint = f"{reads}; correct it if that is wrong, otherwise: {CATALOGUE['CERTIFICATE_EXPIRED'].hint}"
            text = f"the region's certificate ended {ends:%Y-%m-%d %H:%M} UTC"
            raise GeofedError("CERTIFICATE_EXPIRED", text, hint=hint)
        if begins.timestamp() > now:
            text = f"the region's certificate begins {begins:%Y-%m-%d %H:%M} UTC, and {reads}"
            raise GeofedError("CERTIFICATE_INVALID", text, hint="set the clock, then try again")

    def renewal_request(self) -> bytes:
        """Create a signing request for the region's key."""
        key = serialization.load_pem_private_key(self.key_file.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise GeofedError(
                "STATE_INVALID", f"{self.key_file} is not the key that was created when the region joined"
            )
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.federation.region)])
        request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
        return request.public_bytes(serialization.Encoding.PEM)

    def renewal_due_in(self, now: float) -> float:
        """Return the seconds until half of the certificate's lifetime has passed; the operator renews given files."""
        if self._given is not None:
            return math.inf
        certificate = self.certificate
        begins, ends = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
        return (begins + ends) / 2 - now
