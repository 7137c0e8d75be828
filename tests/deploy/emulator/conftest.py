from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path

import pytest

from deploy.emulator import CONTROL, EmulatedLink, Emulator, WanProfile


def _namespaces() -> set[int]:
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                found.add(os.stat(f"/proc/{entry}/ns/net").st_ino)
            except OSError:
                continue
    return found


def _cores() -> set[str]:
    found = set()
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and b"deploy.emulator._core" in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.add(entry)
        except OSError:
            continue
    return found


def _devices() -> set[str]:
    """Network devices, without bridges and their ports: containers of tests that run beside this one have such. The
    emulator has its devices in namespaces of its own."""
    found = Path("/sys/class/net")
    return {one.name for one in found.iterdir() if not (one / "bridge").exists() and not (one / "master").exists()}


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Network devices, namespaces with processes in them and emulator processes are those of before."""
    before = _devices(), _namespaces(), _cores()
    yield
    deadline = time.monotonic() + 5
    while True:
        devices, spaces, cores = _devices() - before[0], _namespaces() - before[1], _cores() - before[2]
        if not (devices or spaces or cores) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not devices
    assert not cores
    # other tests may run beside this one: only spaces that hold a process of ours count
    assert not {s for s in spaces if _marked(s)}


def _marked(inode: int) -> bool:
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.stat(f"/proc/{entry}/ns/net").st_ino == inode:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if b"GEOFED_EMULATOR_ID=" in file.read():
                        return True
        except OSError:
            continue
    return False


@pytest.fixture(scope="session")
def emulator_works() -> None:
    reason = Emulator.supported()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def two_regions() -> Callable[[EmulatedLink], WanProfile]:
    """A profile with regions ``a`` and ``b`` and the same link both ways."""

    def build(link: EmulatedLink) -> WanProfile:
        sites = (CONTROL, "a", "b")
        links = {pair: EmulatedLink() if CONTROL in pair else link for pair in permutations(sites, 2)}
        return WanProfile("two", "two regions", "a test", ("a", "b"), links)

    return build
