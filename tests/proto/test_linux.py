"""That freed memory stays with the process: told by the pages that the kernel has to bring."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
from geofed_pb.linux import keep_freed_memory

if sys.argv[1] == "keeps":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def use(size):
    at = libc.malloc(size)
    ctypes.memset(at, 1, size)
    libc.free(at)

use(64 << 20)
before = faults()
for _ in range(4):
    use(64 << 20)
print(faults() - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_what_is_freed_is_taken_again() -> None:
    def faults(how: str) -> int:
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60
        )
        return int(ran.stdout)

    assert faults("keeps") < 0.1 * faults("leaves it")
