"""The hold back-end against real netem, which runs in user-mode Linux where this kernel has none."""

from __future__ import annotations

import ctypes
import glob
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.netns, pytest.mark.usefixtures("emulator_works")]

ROOT = Path(__file__).resolve().parents[3]
MEASURE = Path(__file__).with_name("measure.py")

LOAD_MODULES = """
import ctypes, glob, os
for name in ("veth", "sch_netem", "sch_htb", "cls_u32"):
    for path in glob.glob(f"/usr/lib/uml/modules/*/kernel/**/{name}.ko", recursive=True):
        ctypes.CDLL(None).syscall(313, os.open(path, 0), b"", 0)  # finit_module
"""

# user-mode Linux keeps only the oldest floating-point state on some processors (see below), so nothing inside
# may use wider registers
NO_WIDE_REGISTERS = "glibc.cpu.hwcaps=-AVX2,-AVX512VL,-AVX512BW,-AVX_Fast_Unaligned_Load,-AVX512F,-AVX"

BOOT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/ TMPDIR=/run GLIBC_TUNABLES={tunables}
export PYTHONPATH={root}:{root}/proto PYTHONDONTWRITEBYTECODE=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmpfs /run
ip link set lo up
cd /
{python} -S {folder}/modules.py
timeout 80 {python} {measure} netem {folder}/netem.json >{folder}/log 2>&1
cat /run/geofed-emulator-*/emulator.log >>{folder}/log 2>/dev/null
echo o >/proc/sysrq-trigger
sleep 5
"""


def _hide_extended_registers() -> None:
    """Let ptrace answer that it knows no extended registers, in this process and its children.

    Linux 6.1 as user-mode kernel reads at most 2696 bytes of them and panics where the processor has more (AMX);
    without an answer it takes the basic ones.
    """
    filter_step = struct.Struct("=HBBI")
    load, equals, answer = 0x20, 0x15, 0x06
    ptrace, getregset, xstate, eio, allow = 101, 0x4204, 0x202, 0x00050005, 0x7FFF0000
    steps = [
        (load, 0, 0, 0), (equals, 0, 5, ptrace),
        (load, 0, 0, 16), (equals, 0, 3, getregset),
        (load, 0, 0, 32), (equals, 0, 1, xstate),
        (answer, 0, 0, eio), (answer, 0, 0, allow),
    ]  # fmt: skip
    program = ctypes.create_string_buffer(b"".join(filter_step.pack(*step) for step in steps))
    header = ctypes.create_string_buffer(struct.pack("=H6xQ", len(steps), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    libc.prctl(22, 2, header, 0, 0)  # PR_SET_SECCOMP, filter


def _boot(folder: Path) -> subprocess.Popen[bytes]:
    (folder / "modules.py").write_text(LOAD_MODULES)
    init = folder / "init"
    init.write_text(
        BOOT.format(root=ROOT, python=sys.executable, measure=MEASURE, folder=folder, tunables=NO_WIDE_REGISTERS)
    )
    init.chmod(0o755)
    argv = ["linux.uml", "mem=512M", "rootfstype=hostfs", "rootflags=/", "rw", "root=/dev/root", f"init={init}"]
    argv += ["con=null", "con0=null,fd:1", "quiet"]
    with open(folder / "console", "wb") as console:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            env={**os.environ, "TMPDIR": str(folder)},
            start_new_session=True,
            preexec_fn=_hide_extended_registers,
        )


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    if shutil.which("linux.uml") is None or not glob.glob("/usr/lib/uml/modules/*"):
        pytest.skip("no kernel with netem to compare with: package user-mode-linux is not installed")
    if os.geteuid() != 0:
        pytest.skip("user-mode Linux shares the file system of root")
    folder = tmp_path_factory.mktemp("uml")
    held = folder / "hold.json"
    # In turn: user-mode Linux needs the processor that the other measurement would take.
    subprocess.run([sys.executable, str(MEASURE), "hold", str(held)], check=True, timeout=90)
    machine = _boot(folder)
    try:
        machine.wait(90)
    finally:
        if machine.poll() is None:
            os.killpg(machine.pid, 9)
            machine.wait()
    real = folder / "netem.json"
    if not real.exists():
        console = (folder / "console").read_text(errors="replace")[-1500:]
        log = (folder / "log").read_text(errors="replace")[-1500:] if (folder / "log").exists() else ""
        pytest.fail(f"user-mode Linux gave no figures:\n{console}\n{log}")
    return json.loads(held.read_text()), json.loads(real.read_text())


def test_each_ran_its_back_end(figures: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert [figure["backend"] for figure in figures] == ["hold", "netem"]


def test_constant_delay_agrees_within_1_ms(figures: tuple[dict[str, Any], dict[str, Any]]) -> None:
    held, real = (statistics.median(figure["constant_ms"]) for figure in figures)
    assert held == pytest.approx(real, abs=1)


def test_jitter_has_the_same_distribution(figures: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Kolmogorov-Smirnov distance of two samples of 250: 0.17 is exceeded by chance once in a thousand."""
    held, real = (sorted(figure["jitter_ms"]) for figure in figures)
    assert len(held) == len(real) == 250

    def below(sample: list[float], value: float) -> float:
        return sum(item <= value for item in sample) / len(sample)

    # medians of 250 draws differ by 0.9 ms themselves; a constant shift is the constant delay's affair
    shift = statistics.median(held) - statistics.median(real)
    assert abs(shift) < 2.5
    moved = [item - shift for item in held]
    assert max(abs(below(moved, value) - below(real, value)) for value in real) < 0.17
    for sample in (held, real):
        # deciles, since a busy machine puts a few stragglers at the end
        deciles = statistics.quantiles(sample, n=10)
        assert deciles[-1] - deciles[0] == pytest.approx(0.8 * 20, rel=0.2)


def test_loss_agrees(figures: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """5 % of 1333 datagrams: the standard deviation is 0.6 points each."""
    for figure in figures:
        assert figure["loss"] == pytest.approx(0.05, abs=0.024)


@pytest.mark.parametrize(("kind", "shaped"), [("payload_mbps", 19.3), ("datagram_mbps", 20.0)])
def test_rate_agrees_within_5_percent(figures: tuple[dict[str, Any], dict[str, Any]], kind: str, shaped: float) -> None:
    """The best of a few. A kernel in user mode may be too slow for the rate on a busy machine, but never faster."""
    held, real = (max(figure[kind]) for figure in figures)
    assert held == pytest.approx(shaped, rel=0.05), figures
    assert 0.7 * shaped < real < 1.05 * held, figures
