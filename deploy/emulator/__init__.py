"""WAN emulator: one network namespace per region, connected by links with real-world rates and delays."""

from __future__ import annotations

from pathlib import Path

from deploy.emulator._emulator import Emulator
from deploy.emulator._link import CONTROL, EmulatedLink, WanProfile

__all__ = ["CONTROL", "EmulatedLink", "Emulator", "WanProfile", "load_profile", "profile_names"]


def load_profile(name_or_path: str | Path) -> WanProfile:
    """Load a shipped profile by name, or a YAML file by path.

    Raises GeofedError CONFIG_INVALID with the file, the line and the key at fault.
    """
    # imported here, since the schema's libraries are slow to import and `--help` does not need them
    from deploy.emulator import _schema

    return _schema.load_profile(name_or_path)


def profile_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    from deploy.emulator import _schema

    return _schema.profile_names()
