"""Secrets of the embedded gateway, each in a private file."""

from __future__ import annotations

from pathlib import Path

from geofed_pb.files.durable import write_durably
from region_agent.gateway.embedded.replica_table import Refused
from region_agent.gateway.functions import is_dns_label

__all__ = ["SecretStore"]


class SecretStore:
    """Files of mode 0600 in a directory of mode 0700; every method raises ``Refused``."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory

    def names(self) -> list[str]:
        """Names of all secrets."""
        return sorted(path.name for path in self._directory.iterdir() if is_dns_label(path.name))

    def create(self, name: str, value: bytes) -> None:
        """Store a secret under a new name; 409 where it exists."""
        if self._path(name).exists():
            raise Refused(409, f"secret {name} exists; update it with PUT")
        self._write(name, value)

    def update(self, name: str, value: bytes) -> None:
        """Replace a secret; 404 where there is none."""
        self.read(name)
        self._write(name, value)

    def delete(self, name: str) -> None:
        """Remove a secret; 404 where there is none."""
        self.read(name)
        self._path(name).unlink()

    def read(self, name: str) -> bytes:
        """The value; 404 where there is none."""
        path = self._path(name)
        if not path.exists():
            raise Refused(404, f"secret {name} does not exist")
        return path.read_bytes()

    def copy(self, names: tuple[str, ...], directory: Path) -> None:
        """Copy the named secrets to a replica's own directory."""
        directory.mkdir(mode=0o700)
        for name in names:
            (directory / name).write_bytes(self.read(name))
            (directory / name).chmod(0o400)

    def _path(self, name: str) -> Path:
        if not is_dns_label(name):
            raise Refused(400, f"secret name {name!r} is not a DNS label")
        return self._directory / name

    def _write(self, name: str, value: bytes) -> None:
        write_durably(self._path(name), [value], mode=0o600)
