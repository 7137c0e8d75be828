"""Signatures of updates: each region signs the manifests of its updates with the key of its certificate. With secure
aggregation it signs its mask key, too.

A receiver checks the signature, and that the certificate names the region and comes from the federation's authority. So
no region can make, change or end another's updates, whoever passes them on.
"""

from __future__ import annotations

import itertools
import json
import time
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import region_in
from geofed_pb.v1 import sync_pb2
from sync.tcp_streams.sockets import Tls

__all__ = ["sign", "signature_of", "statement", "verify", "verify_signature"]

_VERSION = "geofed update 1"
"""First element of a statement, so that a signature never holds for anything else."""
_MAX_CERTIFICATE_BYTES = 16 << 10
"""Largest certificate, with those between it and the authority."""
_MAX_CERTIFICATES = 4
"""Certificates from the region's own to the one below the authority."""
_KEPT_SECONDS = 30 * 86400.0
"""How long the signatures of a certificate hold after its end: another region may pass an update on for as long as a
third one is away. The certificate of the sender itself is checked by TLS."""

_PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey
_PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey


def statement(proto: sync_pb2.UpdateManifest) -> bytes:
    """Return what is signed: all fields of a manifest that say something about its update."""
    values = [
        _VERSION, proto.job, proto.region, proto.epoch, proto.sequence, proto.digest, proto.total_bytes,
        proto.weight.hex(), sorted(proto.seen.items()), proto.last, proto.stretch, proto.settled, proto.ends,
        proto.first, proto.takes_sums, proto.round_seconds.hex(),
    ]  # fmt: skip
    return json.dumps(values, separators=(",", ":")).encode()


def sign(proto: sync_pb2.UpdateManifest, tls: Tls) -> None:
    """Sign a manifest of this region's update."""
    proto.signature = signature_of(statement(proto), tls)
    proto.certificate_pem = tls.certificate_pem


def signature_of(text: bytes, tls: Tls) -> bytes:
    """Return the signature of this region's key over a text, whose begin says what it is for."""
    key = _private_key(tls.key_pem)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(text, ec.ECDSA(hashes.SHA256()))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(text, padding.PKCS1v15(), hashes.SHA256())
    return key.sign(text)


def verify(proto: sync_pb2.UpdateManifest, tls: Tls, *, certificate_pem: bytes | None = None) -> None:
    """Check that a manifest is signed by its region, with a certificate of the authority that ``tls`` trusts.

    ``certificate_pem`` replaces the manifest's own certificate. Raises ``GeofedError("FORBIDDEN")`` if it is not, or
    the certificate is revoked.
    """
    if not proto.signature:
        raise GeofedError("FORBIDDEN", f"update {proto.sequence} of {proto.region} is not signed")
    pem = proto.certificate_pem if certificate_pem is None else certificate_pem
    what = f"update {proto.sequence}"
    verify_signature(statement(proto), bytes(proto.signature), bytes(pem), proto.region, tls, what)


def verify_signature(text: bytes, signature: bytes, pem: bytes, region: str, tls: Tls, what: str) -> None:
    """Check that a text is signed by a region, with a certificate of the authority that ``tls`` trusts.

    ``what`` names it in the error. Raises ``GeofedError("FORBIDDEN")`` if it is not, or the certificate is revoked.
    """
    try:
        ends, serial = _verified(pem, tls.ca_pem, region, signature, text)
        if ends + _KEPT_SECONDS < time.time():
            raise ValueError("the certificate ended long ago")
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
        reason = str(error) or "the signature is of another key or text"
        raise GeofedError("FORBIDDEN", f"{what} of {region} is not signed by its region: {reason}") from None
    tls.revoked.require(serial, region)


@lru_cache(maxsize=1024)
def _verified(pem: bytes, ca_pem: bytes, region: str, signature: bytes, text: bytes) -> tuple[float, str]:
    """Return when a valid signature's certificate ends, and its serial number; each stream of an update asks again."""
    key, ends, serial = _certified_key(pem, ca_pem, region)
    _check(key, signature, text)
    return ends, serial


def _check(key: _PublicKey, signature: bytes, text: bytes) -> None:
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, text, ec.ECDSA(hashes.SHA256()))
    elif isinstance(key, rsa.RSAPublicKey):
        key.verify(signature, text, padding.PKCS1v15(), hashes.SHA256())
    else:
        key.verify(signature, text)


@lru_cache(maxsize=8)
def _private_key(pem: bytes) -> _PrivateKey:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, _PrivateKey):
        raise GeofedError("CONFIG_INVALID", "the region's key is of a kind that updates cannot be signed with")
    return key


@lru_cache(maxsize=256)
def _certified_key(pem: bytes, ca_pem: bytes, region: str) -> tuple[_PublicKey, float, str]:
    """Return the key that the authority has certified for a region, when its certificate ends in Unix seconds, and the
    certificate's serial number in hexadecimal.

    Raises ValueError, TypeError, InvalidSignature or ExtensionNotFound if there is none.
    """
    if len(pem) > _MAX_CERTIFICATE_BYTES:
        raise ValueError("the certificate is too large")
    chain = x509.load_pem_x509_certificates(pem)
    if len(chain) > _MAX_CERTIFICATES:
        raise ValueError("there are too many certificates")
    names = chain[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if region_in(names.get_values_for_type(x509.DNSName)) != region:
        raise ValueError("the certificate is of another region")
    for lower, upper in itertools.pairwise(chain):
        if not upper.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            raise ValueError("a certificate may not issue others")
        lower.verify_directly_issued_by(upper)
    if not any(_issued(chain[-1], authority) for authority in x509.load_pem_x509_certificates(ca_pem)):
        raise ValueError("the certificate is not of this federation")
    key = chain[0].public_key()
    if not isinstance(key, _PublicKey):
        raise TypeError("the key is of an unknown kind")
    return key, chain[0].not_valid_after_utc.timestamp(), f"{chain[0].serial_number:x}"


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
