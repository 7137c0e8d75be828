"""A machine of its own under a real systemd: namespaces of processes, mounts and network over a Debian root."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

__all__ = ["Machine", "booted", "need_systemd"]

_START_SECONDS = 30.0
_CGROUPS = Path("/sys/fs/cgroup")
_PROGRAMS = ("debootstrap", "unshare", "nsenter", "ip")
_BOOT = """
set -e
mount --make-rprivate /
mount --bind "$ROOT" "$ROOT"
mount -t proc proc "$ROOT/proc"
mount -t sysfs -o ro sysfs "$ROOT/sys"
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
  mount -t cgroup2 cgroup2 "$ROOT/sys/fs/cgroup"
else
  mount -t tmpfs tmpfs "$ROOT/sys/fs/cgroup"
  mkdir "$ROOT/sys/fs/cgroup/systemd"
  mount -t cgroup -o none,name=systemd cgroup "$ROOT/sys/fs/cgroup/systemd"
fi
for folder in run tmp dev; do mount -t tmpfs tmpfs "$ROOT/$folder"; done
for device in null zero random urandom full tty; do
  touch "$ROOT/dev/$device"
  mount --bind "/dev/$device" "$ROOT/dev/$device"
done
mkdir "$ROOT/dev/pts" "$ROOT/dev/shm" "$ROOT/old"
ln -s pts/ptmx "$ROOT/dev/ptmx"
mount -t tmpfs -o mode=1777 tmpfs "$ROOT/dev/shm"
ip link set lo up
cd "$ROOT"
pivot_root . old
umount -l old
rmdir old
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --log-target=journal
"""


class Machine:
    """What runs in the machine is run by root, beside systemd."""

    def __init__(self, pid: int) -> None:
        self._enter = ["nsenter", "-t", str(pid), "-p", "-m", "-u", "-i", "-n", "-C", "--"]

    def start(self, *command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
        # In a folder that there is.
        argv = [*self._enter, "env", "-i", *(f"{name}={value}" for name, value in environment.items()), *command]
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, cwd="/")

    def __call__(self, *command: str, timeout: float = 120) -> str:
        """Run a command, which must succeed; return what it printed."""
        done = self.start(*command, timeout=timeout)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}{self.journal()}"
        return done.stdout

    def journal(self) -> str:
        return self.start("journalctl", "--no-pager", "--lines=40").stdout

    def shown(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self("systemctl", "show", unit, "--value", f"--property={name}").strip()


def need_systemd() -> None:
    """Skip the test where no systemd can be made to run."""
    if os.geteuid() != 0:
        pytest.skip("a systemd of the tests' own needs root")
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install debootstrap util-linux iproute2")
    if not any((_CGROUPS / name).exists() for name in ("cgroup.controllers", "systemd/cgroup.procs")):
        pytest.skip("this machine has no control groups for a systemd")


@contextmanager
def booted(root: Path) -> Iterator[Machine]:
    """Boot a Debian root; skip the test where no systemd comes up."""
    name = f"geofed-test-{uuid.uuid4().hex[:8]}"
    # Version 2 has one hierarchy, version 1 several.
    whole = (_CGROUPS / "cgroup.controllers").exists()
    tops = [_CGROUPS] if whole else [one for one in _CGROUPS.iterdir() if (one / "cgroup.procs").exists()]
    ours = [top / name for top in tops]
    lines = [f"mkdir {cgroup} && echo $$ > {cgroup}/cgroup.procs || true" for cgroup in ours]
    flags = ["--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup", "--fork", "--kill-child"]
    lines.append(f"exec unshare {' '.join(flags)} sh -c '{_BOOT}'")
    process = subprocess.Popen(
        ["sh", "-c", "\n".join(lines)], env={**os.environ, "ROOT": str(root)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield Machine(_pid_of_systemd(process))
    finally:
        process.kill()
        process.communicate()
        for cgroup in ours:
            _remove(cgroup)


def _pid_of_systemd(process: subprocess.Popen[str]) -> int:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        for child in psutil.Process(process.pid).children():
            with suppress(psutil.Error):
                if child.exe().endswith("/systemd"):
                    state = Machine(child.pid).start("systemctl", "is-system-running").stdout.strip()
                    if state == "degraded":
                        pytest.fail(Machine(child.pid).start("systemctl", "--failed", "--no-pager").stdout)
                    if state == "running":
                        return child.pid
        time.sleep(0.1)
    process.kill()
    pytest.skip(f"no systemd can run on this machine: {process.communicate()[0][-500:]}")


def _remove(cgroup: Path) -> None:
    deadline = time.monotonic() + 10
    while cgroup.exists() and time.monotonic() < deadline:
        for folder in sorted((Path(one) for one, _, _ in os.walk(cgroup)), key=lambda one: -len(one.parts)):
            with suppress(OSError):
                folder.rmdir()
        time.sleep(0.05)
