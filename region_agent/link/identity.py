"""The region's key and certificate: made here, signed by the control plane, renewed at half of their life."""

from __future__ import annotations

import base64
import binascii
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from geofed_pb.errors import CATALOGUE, GeofedError
from sync.durable import write_durably
from sync.transport.sockets import Tls

__all__ = ["Identity", "Invitation", "make_request", "read_invitation"]

_PREFIX = "geofed1."


@dataclass(frozen=True)
class Invitation:
    """What `control-plane region invite` prints, unpacked."""

    address: str
    """host:port of the control port."""
    ca_pem: bytes
    """The authority to trust, so that the first contact is safe already."""
    region: str
    secret: str


def read_invitation(text: str) -> Invitation:
    """Unpack a token; raises ``GeofedError("TOKEN_INVALID")``."""
    text = text.strip()
    try:
        if not text.startswith(_PREFIX):
            raise ValueError("it does not begin as a token does")
        body = text.removeprefix(_PREFIX)
        raw = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        ca = x509.load_der_x509_certificate(base64.b64decode(raw["ca"]))
        pem = ca.public_bytes(serialization.Encoding.PEM)
        return Invitation(str(raw["address"]), pem, str(raw["region"]), str(raw["secret"]))
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise GeofedError("TOKEN_INVALID", f"this is no invitation: {error}") from None


def make_request(region: str) -> tuple[bytes, bytes]:
    """A fresh key and a signing request for it, both PEM; the key never leaves this machine."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, region)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return key_pem, request.public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True)
class Federation:
    """Whom the region has joined."""

    region: str
    address: str
    """host:port of the agent port."""
    federation: str


class Identity:
    """The files in ``<state>/identity``: key and certificate in one generation each, so that a renewal is atomic."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / "identity"
        self.ca_file = self.folder / "ca.pem"
        self.certificate_file = self.folder / "certificate.pem"
        self.key_file = self.folder / "key.pem"
        self._federation_file = self.folder / "federation.json"

    def store(self, federation: Federation, key_pem: bytes, certificate_pem: bytes, ca_pem: bytes) -> None:
        """Keep what joining gave."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(self.folder, 0o700)
        for path, content in (
            (self.ca_file, ca_pem),
            (self.key_file, key_pem),
            (self.certificate_file, certificate_pem),
            (self._federation_file, json.dumps(asdict(federation)).encode()),
        ):
            write_durably(path, [content])
            os.chmod(path, 0o600)

    def renew(self, certificate_pem: bytes, ca_pem: bytes) -> None:
        """Keep a renewed certificate; it is for the same key, so no order of writes can leave a mismatch."""
        write_durably(self.ca_file, [ca_pem])
        write_durably(self.certificate_file, [certificate_pem])

    @property
    def federation(self) -> Federation:
        """Raises ``GeofedError("UNAUTHENTICATED")`` where the region has not joined."""
        try:
            return Federation(**json.loads(self._federation_file.read_text()))
        except FileNotFoundError:
            text = "this region has not joined a federation"
            hint = "get an invitation with `control-plane region invite NAME`, then `region-agent join`"
            raise GeofedError("UNAUTHENTICATED", text, hint=hint) from None

    def tls(self) -> Tls:
        """As it is in the files now: it is renewed while others use it."""
        return Tls(self.ca_file.read_bytes(), self.certificate_file.read_bytes(), self.key_file.read_bytes())

    @property
    def certificate(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.certificate_file.read_bytes())

    def check(self) -> None:
        """Raises ``GeofedError``, by this machine's clock: CERTIFICATE_EXPIRED where the certificate is over,
        CERTIFICATE_INVALID where it has not begun."""
        self.federation  # noqa: B018 - raises where there is none
        begins, ends, now = self.certificate.not_valid_before_utc, self.certificate.not_valid_after_utc, time.time()
        reads = f"this machine's clock says {time.strftime('%Y-%m-%d %H:%M', time.gmtime(now))} UTC"
        if ends.timestamp() < now:
            hint = f"{reads}; set it where that is wrong, else: {CATALOGUE['CERTIFICATE_EXPIRED'].hint}"
            text = f"the region's certificate ended {ends:%Y-%m-%d %H:%M} UTC"
            raise GeofedError("CERTIFICATE_EXPIRED", text, hint=hint)
        if begins.timestamp() > now:
            text = f"the region's certificate begins {begins:%Y-%m-%d %H:%M} UTC, and {reads}"
            raise GeofedError("CERTIFICATE_INVALID", text, hint="set the clock, then try again")

    def renewal_request(self) -> bytes:
        """A signing request for the key that the region has."""
        key = serialization.load_pem_private_key(self.key_file.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise GeofedError("STATE_INVALID", f"{self.key_file} is not the key that joining made")
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.federation.region)])
        request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
        return request.public_bytes(serialization.Encoding.PEM)

    def renewal_due_in(self, now: float) -> float:
        """Seconds until half of the certificate's life is over."""
        certificate = self.certificate
        begins, ends = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
        return (begins + ends) / 2 - now
