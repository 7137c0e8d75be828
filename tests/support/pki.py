"""A certificate authority for tests: what the control plane's would give to regions, and what it never would."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from geofed_pb.rpc import region_name
from sync.tcp_streams.sockets import Tls


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


class Authority:
    """Signs what it is asked for."""

    def __init__(self, name: str = "test federation") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.now(UTC)
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM)
        self.der = self._certificate.public_bytes(serialization.Encoding.DER)

    def issue(
        self,
        common_name: str,
        dns_name: str,
        *,
        key: ec.EllipticCurvePrivateKey | None = None,
        begins: timedelta = timedelta(minutes=-5),
        life: timedelta = timedelta(hours=1),
    ) -> Tls:
        """A certificate for a name; its validity begins ``begins`` from now."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        start = datetime.now(UTC) + begins
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + life)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Tls(self.pem, certificate.public_bytes(serialization.Encoding.PEM), _pem(key))

    def sign_request(self, csr_pem: bytes, region: str, life: timedelta = timedelta(hours=1)) -> bytes:
        """What the control plane does when a region joins or renews."""
        request = x509.load_pem_x509_csr(csr_pem)
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(request.subject)
            .issuer_name(self._name)
            .public_key(request.public_key())  # type: ignore[arg-type]
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + life)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(region_name(region))]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def region(self, name: str, **life: timedelta) -> Tls:
        """What a region has after joining."""
        return self.issue(name, region_name(name), **life)  # type: ignore[arg-type]


def write(tls: Tls, folder: Path) -> tuple[Path, Path, Path]:
    """The identity as files: authority, certificate, key."""
    folder.mkdir(parents=True, exist_ok=True)
    files = (folder / "ca.pem", folder / "certificate.pem", folder / "key.pem")
    for path, content in zip(files, (tls.ca_pem, tls.certificate_pem, tls.key_pem), strict=True):
        path.write_bytes(content)
    return files
