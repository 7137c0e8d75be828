"""The federation's certificate authority, certificates, tokens and invitations."""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import json
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably
from geofed_pb.rpc import CONTROL_PLANE_NAME, region_name

CA_LIFE = timedelta(days=3650)
"""Lifetime of the CA's certificate."""
SERVER_LIFE = timedelta(days=30)
"""Lifetime of the control plane's certificate; it is renewed at half of it, while the control plane runs."""
REGION_LIFE = timedelta(days=7)
"""Default lifetime of a region's certificate, renewed at half of it. It bounds how long a peer that cannot be told of
a revocation accepts the certificate; and an agent may be without a control plane for half of it, a long weekend."""
BACKDATE = timedelta(minutes=5)
"""Certificates are valid from this long before their creation, for clocks that are behind."""
_TOKEN_PREFIX = "geofed1."


@dataclass(frozen=True)
class Issued:
    """A certificate signed for a region."""

    certificate_pem: bytes
    serial: str
    expires: float
    """Expiry in Unix seconds."""


@dataclass(frozen=True)
class InvitationToken:
    """The token of `region invite`: the control plane's address and CA, and a secret that is valid once."""

    address: str
    """host:port of the control port."""
    ca_pem: bytes
    region: str
    secret: str

    def __str__(self) -> str:
        certificate = x509.load_pem_x509_certificate(self.ca_pem).public_bytes(serialization.Encoding.DER)
        fields = {
            "address": self.address,
            "ca": base64.b64encode(certificate).decode(),
            "region": self.region,
            "secret": self.secret,
        }
        return _TOKEN_PREFIX + base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> InvitationToken:
        """Parse a token. Raises ``GeofedError("TOKEN_INVALID")``."""
        encoded = text.strip().removeprefix(_TOKEN_PREFIX)
        try:
            fields = json.loads(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
            certificate = x509.load_der_x509_certificate(base64.b64decode(fields["ca"]))
            pem = certificate.public_bytes(serialization.Encoding.PEM)
            return cls(str(fields["address"]), pem, str(fields["region"]), str(fields["secret"]))
        except (ValueError, KeyError, TypeError, RecursionError, binascii.Error):
            raise GeofedError("TOKEN_INVALID", "the invitation is invalid or incomplete") from None


class GivenAuthority:
    """The operator's own CA: certificates and keys are files that the operator replaces; nothing is issued here."""

    issues = False
    """Whether it signs certificates of regions."""

    def __init__(self, ca_file: Path, certificate_file: Path, key_file: Path) -> None:
        self.ca_file, self._certificate_file, self._key_file = ca_file, certificate_file, key_file

    @property
    def ca_pem(self) -> bytes:
        """The trusted certificates, as the file has them now. Raises ``GeofedError("CONFIG_INVALID")``."""
        return _read(self.ca_file)

    @property
    def fingerprint(self) -> str:
        """Empty: the operator may replace the CA."""
        return ""

    @property
    def trusts(self) -> tuple[str, ...]:
        """Fingerprints of all trusted CAs."""
        return ("",)

    def server_certificate(self, hosts: Sequence[str], now: datetime) -> tuple[Path, Path]:
        """Return the paths of the control plane's certificate and key.

        Raises ``GeofedError("CONFIG_INVALID")`` if the certificate lacks the name by which all clients check it.
        """
        names = _names_of(x509.load_pem_x509_certificate(_read(self._certificate_file)))
        if CONTROL_PLANE_NAME not in names:
            text = f"{self._certificate_file} lacks the DNS name {CONTROL_PLANE_NAME}, by which all clients check it"
            raise GeofedError("CONFIG_INVALID", text)
        _read(self._key_file)
        return self._certificate_file, self._key_file

    def sign_region(self, csr_pem: bytes, region: str, now: datetime, life: timedelta = REGION_LIFE) -> Issued:
        """Raise ``GeofedError("CERTIFICATE_INVALID")``: the operator's CA signs."""
        raise not_issued()


class Authority:
    """The federation's CA. Its folder has `ca.crt`, `ca.key`, `server.crt` and `server.key`; keys have mode 0600.

    While the CA is replaced, `ca.crt` has two certificates, which are both trusted: the one that signs comes first.
    """

    issues = True
    """Whether it signs certificates of regions."""

    def __init__(
        self,
        folder: Path,
        certificate: x509.Certificate,
        key: ec.EllipticCurvePrivateKey,
        others: Sequence[x509.Certificate] = (),
    ) -> None:
        self._folder = folder
        self._certificate = certificate
        self._key = key
        self._others = tuple(others)
        self._signing = threading.Lock()
        """Held while the control plane's own key and certificate are made, which belong together: it is renewed
        regularly, and by each step of the CA's replacement."""

    @property
    def ca_pem(self) -> bytes:
        """The certificates of all trusted CAs; the one that signs comes first."""
        trusted = (self._certificate, *self._others)
        return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in trusted)

    @classmethod
    def open(cls, folder: Path, federation: str, now: datetime) -> Authority:
        """Load the CA of a folder, or create it. Raises ``GeofedError("STATE_INVALID")`` if it is damaged."""
        if (found := cls.load(folder)) is not None:
            return found
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        certificate, key = _make_ca(federation, now)
        # The certificate last: after a crash in between, the key is not in use yet and is replaced.
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        write_durably(folder / "ca.key", [_key_pem(key)], mode=0o600)
        write_durably(folder / "ca.crt", [pem], mode=0o644)
        return cls(folder, certificate, key)

    @classmethod
    def load(cls, folder: Path) -> Authority | None:
        """Load the CA of a folder; None if there is none. Raises ``GeofedError("STATE_INVALID")`` if it is damaged."""
        certificate_path, key_path = folder / "ca.crt", folder / "ca.key"
        if not certificate_path.exists():
            return None
        if not key_path.exists():
            raise GeofedError("STATE_INVALID", f"{folder} has ca.crt, but its key ca.key is missing")
        try:
            trusted = x509.load_pem_x509_certificates(certificate_path.read_bytes())
            key = serialization.load_pem_private_key(key_path.read_bytes(), None)
        except ValueError as error:
            raise GeofedError("STATE_INVALID", f"the CA in {folder} cannot be read: {error}") from None
        own = [one for one in trusted if one.public_key() == key.public_key()]
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not own:
            raise GeofedError("STATE_INVALID", f"ca.key in {folder} does not belong to ca.crt")
        return cls(folder, own[0], key, [one for one in trusted if one is not own[0]])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate of the CA that signs."""
        return _fingerprint(self._certificate)

    @property
    def trusts(self) -> tuple[str, ...]:
        """Fingerprints of all trusted CAs."""
        return tuple(_fingerprint(one) for one in (self._certificate, *self._others))

    @property
    def stage(self) -> str:
        """How far the replacement of the CA is: "single", "prepared" or "switched"."""
        if not self._others:
            return "single"
        return "prepared" if self._next_key.exists() else "switched"

    @property
    def stage_since(self) -> float:
        """Unix seconds at which the stage began."""
        return self.ca_file.stat().st_mtime

    @property
    def _next_key(self) -> Path:
        return self._folder / "ca-next.key"

    def advance(self, federation: str, now: datetime) -> str:
        """Take the next step of the CA's replacement; return the stage.

        "prepared": a new CA exists and is trusted beside the present one, which still signs. "switched": the new CA
        signs, the control plane's own certificate too, and the former one is still trusted. "single": only the new CA
        is trusted.
        """
        stage = self.stage
        if stage == "single":
            certificate, key = _make_ca(federation, now)
            write_durably(self._next_key, [_key_pem(key)], mode=0o600)
            self._others = (certificate,)
        elif stage == "prepared":
            key_pem = self._next_key.read_bytes()
            key = serialization.load_pem_private_key(key_pem, None)  # type: ignore[assignment]
            # From this moment on `load` finds the new CA, whatever the order in ca.crt.
            os.replace(self._next_key, self._folder / "ca.key")
            self._certificate, self._others, self._key = self._others[0], (self._certificate,), key
        else:
            self._others = ()
        write_durably(self.ca_file, [self.ca_pem], mode=0o644)
        if (server := self._folder / "server.crt").exists():
            self.server_certificate(sorted(_names_of(x509.load_pem_x509_certificate(server.read_bytes()))), now)
        return self.stage

    @property
    def ca_file(self) -> Path:
        """Path of the CA certificate, for clients."""
        return self._folder / "ca.crt"

    def server_certificate(self, hosts: Sequence[str], now: datetime) -> tuple[Path, Path]:
        """Return the paths of the control plane's certificate and key, valid for its names and `hosts`.

        A new certificate is created if there is none, if half of its lifetime has passed, or if a name is missing.
        """
        certificate_path, key_path = self._folder / "server.crt", self._folder / "server.key"
        names = list(dict.fromkeys([CONTROL_PLANE_NAME, *hosts]))
        with self._signing:
            if certificate_path.exists() and key_path.exists():
                current = x509.load_pem_x509_certificate(certificate_path.read_bytes())
                signed = current.issuer == self._certificate.subject and _signed_by(current, self._certificate)
                if signed and _in_first_half(current, now) and _names_of(current) >= set(names):
                    return certificate_path, key_path
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = self._sign(CONTROL_PLANE_NAME, names, key.public_key(), now, SERVER_LIFE)
            write_durably(key_path, [_key_pem(key)], mode=0o600)
            write_durably(certificate_path, [certificate.public_bytes(serialization.Encoding.PEM)], mode=0o644)
        return certificate_path, key_path

    def sign_region(self, csr_pem: bytes, region: str, now: datetime, life: timedelta = REGION_LIFE) -> Issued:
        """Sign the key of a certificate request for `region`; names in the request are ignored.

        Raises ``GeofedError("CERTIFICATE_INVALID")`` for an invalid request or a weak key.
        """
        try:
            request = x509.load_pem_x509_csr(csr_pem)
            valid = request.is_signature_valid
            key = request.public_key()
        except (ValueError, InvalidSignature):
            raise GeofedError("CERTIFICATE_INVALID", "the certificate request cannot be read") from None
        strong = isinstance(key, ec.EllipticCurvePublicKey) or (
            isinstance(key, rsa.RSAPublicKey) and key.key_size >= 2048
        )
        if not valid or not strong:
            raise GeofedError("CERTIFICATE_INVALID", "the certificate request is not signed, or its key is weak")
        certificate = self._sign(region, [region_name(region)], key, now, life)  # type: ignore[arg-type]
        return Issued(
            certificate.public_bytes(serialization.Encoding.PEM),
            serial_of(certificate),
            certificate.not_valid_after_utc.timestamp(),
        )

    def _sign(
        self,
        name: str,
        hosts: Sequence[str],
        key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
        now: datetime,
        life: timedelta,
    ) -> x509.Certificate:
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACKDATE)
            .not_valid_after(now + life)
            .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(_key_usage(ca=False), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256())


def _signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _fingerprint(certificate: x509.Certificate) -> str:
    return f"sha256:{certificate.fingerprint(hashes.SHA256()).hex()}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise GeofedError("CONFIG_INVALID", f"cannot read {path}: {error.strerror}") from None


def not_issued() -> GeofedError:
    """Return the error of a request for a certificate that the operator's own CA has to sign."""
    hint = "put the region's certificate and key into files that its region file names under `identity`"
    return GeofedError("CERTIFICATE_INVALID", "certificates are issued by the operator's own CA", hint=hint)


def serial_of(certificate: x509.Certificate) -> str:
    """Return a certificate's serial number as stored, in hexadecimal."""
    return f"{certificate.serial_number:x}"


def new_secret() -> str:
    """Return 32 random bytes as URL-safe text."""
    return secrets.token_urlsafe(32)


def hash_secret(secret: str) -> str:
    """Return the stored hash of a random secret. Its entropy is too high to need salt or stretching."""
    return f"sha256:{hashlib.sha256(secret.encode()).hexdigest()}"


def utc_now(seconds: float) -> datetime:
    """Convert Unix seconds to a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def _make_ca(federation: str, now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"geofed CA of {federation}"[:64])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=not ca,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _names_of(certificate: x509.Certificate) -> set[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def _in_first_half(certificate: x509.Certificate, now: datetime) -> bool:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return now < begin + (end - begin) / 2
