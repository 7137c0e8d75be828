"""The WAN emulator: one network namespace per region, joined by links that are as slow as real ones."""

from __future__ import annotations

from pathlib import Path

from deploy.emulator._emulator import Emulator
from deploy.emulator._link import CONTROL, Link, Profile

__all__ = ["CONTROL", "Emulator", "Link", "Profile", "load_profile", "profile_names"]


def load_profile(name_or_path: str | Path) -> Profile:
    """A shipped profile by name, or a YAML file by path.

    Raises GeofedError CONFIG_INVALID with the file, the line and the key at fault.
    """
    # the schema's libraries take longer to import than `--help` may take
    from deploy.emulator import _schema

    return _schema.load_profile(name_or_path)


def profile_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    from deploy.emulator import _schema

    return _schema.profile_names()
