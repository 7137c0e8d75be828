"""Masks: the secrets of pairs of regions, and the numbers that are derived from them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import hashes, hmac
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from geofed_pb.errors import GeofedError

__all__ = ["MaskKey", "PairMasks"]

_SECRET_BYTES = 32
"""Bytes of the secret of two regions, the key of ChaCha20."""
_CHUNK_BYTES = 1 << 18
"""Bytes of a mask that are computed together, so that they stay in the CPU's cache."""

Integers = npt.NDArray[np.unsignedinteger]


class MaskKey:
    """The key of one region in one job, from which it agrees on a secret with each other region (X25519, RFC 7748)."""

    def __init__(self, private: bytes | None = None) -> None:
        """``private``: the 32 bytes of an earlier key; None: a new one is made."""
        self._key = X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)

    @property
    def private(self) -> bytes:
        """The 32 bytes to keep."""
        return self._key.private_bytes_raw()

    @property
    def public(self) -> bytes:
        """The 32 bytes that other regions are told."""
        return self._key.public_key().public_bytes_raw()

    def secret(self, region: str, other: str, public: bytes, terms: str) -> bytes:
        """Return the secret of this key's ``region`` with the ``other`` one (HKDF-SHA256, RFC 5869).

        ``public``: the other region's key. The secret is bound to both names: a region that passes off another's key
        as its own has another secret with everyone, so that no masks cancel or double. ``terms``: what both must agree
        on; other terms give another secret. Raises ``GeofedError("PEER_INVALID")`` for a key with which nothing secret
        can be agreed on.
        """
        try:
            shared = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise GeofedError("PEER_INVALID", f"the mask key of {other} is invalid") from None
        pair = sorted([(region.encode(), self.public), (other.encode(), public)])
        both = b"".join(len(name).to_bytes(2, "big") + name + key for name, key in pair)
        context = b"geofed mask 2\0" + both + terms.encode()
        return HKDF(hashes.SHA256(), _SECRET_BYTES, salt=None, info=context).derive(shared)


class PairMasks:
    """The masks of one region: those of each pair that it is part of."""

    def __init__(self, region: str, secrets: Mapping[str, bytes]) -> None:
        """``secrets``: by the other region's name."""
        self._region, self._secrets = region, dict(secrets)

    def add(self, values: Integers, sequence: int, part: str) -> None:
        """Add the masks of a round to ``values``, of shape (n,), in place and modulo their range.

        ``part`` names the vector within the round's update. A mask may be used for one vector only: whoever gets two
        vectors under one mask learns their difference.
        """
        streams = [
            (self._region < other, _stream(secret, f"{sequence}/{part}"))
            for other, secret in sorted(self._secrets.items())
        ]
        zeros, mask = bytes(_CHUNK_BYTES), bytearray(_CHUNK_BYTES)
        whole = values.view(values.dtype.newbyteorder("<"))
        step = _CHUNK_BYTES // values.itemsize
        for at in range(0, whole.size, step):
            chunk = whole[at : at + step]
            for adds, stream in streams:
                stream.update_into(memoryview(zeros)[: chunk.nbytes], mask)
                numbers = np.frombuffer(mask, chunk.dtype, chunk.size)
                if adds:
                    chunk += numbers
                else:
                    chunk -= numbers


def _stream(secret: bytes, name: str):  # type: ignore[no-untyped-def] # the type of an encryptor has no public name
    """Return a key stream: AES-256 in counter mode with a key of its own, so that the counter can begin at 0."""
    derived = hmac.HMAC(secret, hashes.SHA256())
    derived.update(name.encode())
    return Cipher(algorithms.AES(derived.finalize()), modes.CTR(bytes(16))).encryptor()
