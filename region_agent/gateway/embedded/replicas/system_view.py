"""What every sandbox shows of this machine, read-only: the system's programs and libraries, Python, and GPUs."""

from __future__ import annotations

import glob
import os
import site
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["system_view"]

_ROOTS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders of programs and libraries besides /usr; links into it on most systems."""
_FOLDERS = ("/usr", "/nix/store")
_SETTINGS = (
    "alternatives", "ca-certificates", "crypto-policies", "gai.conf", "host.conf", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "pki/ca-trust", "pki/tls/cert.pem", "pki/tls/certs",
    "pki/tls/openssl.cnf", "protocols", "services", "ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf", "timezone",
)  # fmt: skip
"""Files and folders of /etc that libraries read, none of which holds a secret."""
_DEVICES = ("full", "null", "random", "urandom", "zero")
_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_GPUS = ("/dev/nvidia*", "/dev/dxg", "/dev/kfd")
"""Devices of GPUs, as patterns."""
_GPU_FOLDERS = ("/sys/bus/pci", "/sys/class/drm", "/sys/class/kfd", "/sys/devices", "/sys/module/nvidia")
"""What libraries of GPUs read about them."""
_TOPOLOGY = ("/sys/devices/system/cpu", "/sys/devices/system/node")
"""What numerical libraries read about the processor."""
_COVERED_OF_PROC = ("acpi", "fs", "scsi")
_EMPTIED_OF_PROC = ("kcore", "keys", "kmsg", "latency_stats", "sched_debug", "sysrq-trigger", "timer_list")
_READ_ONLY_OF_PROC = ("sys", "driver", "mtrr")
"""Folders and files of /proc that concern the whole machine, or the keys of its users; the others of a sandbox do not.
The kernel lets root write to some of them even without capabilities."""


def system_view(python_path: Iterable[str], hidden: Iterable[str]) -> list[str]:
    """Return bubblewrap's arguments. ``python_path``: folders from which the warm parent imports."""
    found = _programs() + _settings() + _processes() + _devices()
    for path in _python(python_path, list(hidden)):
        found += ["--ro-bind", path, path]
    return found


def _programs() -> list[str]:
    found = []
    for path in _FOLDERS:
        found += ["--ro-bind-try", path, path]
    for name in _ROOTS:
        path = f"/{name}"
        if os.path.islink(path):
            found += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            found += ["--ro-bind", path, path]
    return found


def _settings() -> list[str]:
    found = []
    for name in _SETTINGS:
        found += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return found


def _processes() -> list[str]:
    found = ["--proc", "/proc"]
    for name in _READ_ONLY_OF_PROC:
        found += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for name in _COVERED_OF_PROC:
        found += ["--tmpfs", f"/proc/{name}"] if os.path.isdir(f"/proc/{name}") else []
    for name in _EMPTIED_OF_PROC:
        found += ["--ro-bind", "/dev/null", f"/proc/{name}"] if os.path.exists(f"/proc/{name}") else []
    return found


def _devices() -> list[str]:
    found = ["--dir", "/run", "--dir", "/var/tmp"]
    gpus = sorted(path for pattern in _GPUS for path in glob.glob(pattern))
    if "/dev/kfd" in gpus:
        gpus.append("/dev/dri")
    for path in (*(f"/dev/{name}" for name in _DEVICES), *gpus):
        found += ["--dev-bind", path, path]
    for name, target in _DEVICE_LINKS.items():
        found += ["--symlink", target, f"/dev/{name}"]
    for path in (*_TOPOLOGY, *(_GPU_FOLDERS if gpus else ())):
        found += ["--ro-bind-try", path, path]
    return found


def _python(python_path: Iterable[str], hidden: list[str]) -> list[str]:
    """Return the folders of the Python environment, and of the rest of ``sys.path`` only what can be imported.

    The folder of a checkout may also hold the state of a daemon.
    """
    whole = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    whole |= {site.getusersitepackages()} & set(python_path)
    whole |= {path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if os.path.isabs(path)}
    whole = {path for path in whole if os.path.isdir(path) and not _is_below(path, _FOLDERS)}
    parts = {
        str(child)
        for path in python_path
        if os.path.isdir(path) and not _is_below(path, (*whole, *_FOLDERS))
        for child in Path(path).iterdir()
        if _is_importable(child) and not _is_below(str(child), hidden)
    }
    return sorted(whole | parts, key=len)


def _is_importable(path: Path) -> bool:
    if path.is_dir():
        return (path / "__init__.py").exists() or path.suffix in (".dist-info", ".egg-info")
    return path.suffix in (".py", ".so")


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)
