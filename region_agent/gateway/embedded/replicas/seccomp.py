"""The filter of system calls of a sandbox, built with libseccomp.

It denies what container engines deny by default: whatever changes mounts, namespaces, modules, clocks or keys, traces
other processes, or has a long list of kernel bugs behind it and no use for training. Everything else is allowed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from functools import cache
from typing import Any

from geofed_pb.linux import call

__all__ = ["filter_program", "restrict"]

_DENIED = (
    "acct", "add_key", "bpf", "chroot", "clock_adjtime", "clock_settime", "create_module", "delete_module",
    "fanotify_init", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "get_kernel_syms", "init_module",
    "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm", "iopl", "kcmp", "kexec_file_load",
    "kexec_load", "keyctl", "lookup_dcookie", "migrate_pages", "mknod", "mknodat", "mount", "mount_setattr",
    "move_mount", "name_to_handle_at", "nfsservctl", "open_by_handle_at", "open_tree", "perf_event_open",
    "personality", "pidfd_getfd", "pivot_root", "process_madvise", "process_vm_readv", "process_vm_writev", "ptrace",
    "query_module", "quotactl", "quotactl_fd", "reboot", "request_key", "setdomainname", "setns", "sethostname",
    "settimeofday", "stime", "swapoff", "swapon", "symlink", "symlinkat", "_sysctl", "sysfs", "syslog", "umount",
    "umount2", "unshare", "uselib", "userfaultfd", "ustat", "vhangup", "vm86", "vm86old",
)  # fmt: skip
"""System calls that fail with EPERM. Without symbolic links and named pipes in the job's channel, the parameter server,
which is outside, opens what it means to."""
_NAMESPACE_FLAGS = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
"""Flags of clone for new namespaces, as of `linux/sched.h`."""
_FAMILIES = frozenset({socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK})
"""Families of sockets that a function may create. Others, such as AF_VSOCK, are not bound to a network namespace."""
_MAX_FAMILY = 64
"""Above the numbers of all families that Linux has."""
_TIOCSTI = 0x5412
"""The ioctl that types into a terminal, as of `asm-generic/ioctls.h`."""

_ALLOW = 0x7FFF0000
"""Action: the call is made. As of `linux/seccomp.h`."""
_ERRNO = 0x00050000
"""Action: the call fails, with the error in the lower 16 bits. As of `linux/seccomp.h`."""
_EQUAL, _AT_LEAST, _MASKED_EQUAL = 4, 5, 7
"""Actions and comparisons, as of `seccomp.h`."""
_OPTIMISE = 8
"""Attribute of `seccomp.h`: with 2 the program is a binary tree, which costs a system call less time."""
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
"""prctl option and its argument, as of `linux/prctl.h` and `linux/seccomp.h`."""
_INSTRUCTION_BYTES = 8
"""Size of ``struct sock_filter``."""


class _Comparison(ctypes.Structure):
    """``struct scmp_arg_cmp`` of `seccomp.h`."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class _Program(ctypes.Structure):
    """``struct sock_fprog`` of `linux/filter.h`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


@cache
def filter_program() -> bytes:
    """Return the filter as a BPF program for this machine. Raises ``OSError`` if libseccomp is missing."""
    library = _library()
    context = library.seccomp_init(_ALLOW)
    if not context:
        raise OSError(errno.ENOMEM, "seccomp_init failed")
    try:
        library.seccomp_attr_set(context, _OPTIMISE, 2)
        for name in _DENIED:
            _deny(library, context, name)
        # Its flags are in memory, which a filter cannot read. C libraries then use clone.
        _deny(library, context, "clone3", number=errno.ENOSYS)
        for flag in _NAMESPACE_FLAGS:
            _deny(library, context, "clone", _Comparison(0, _MASKED_EQUAL, flag, flag))
        for family in set(range(_MAX_FAMILY)) - _FAMILIES:
            _deny(library, context, "socket", _Comparison(0, _EQUAL, family, 0))
        _deny(library, context, "socket", _Comparison(0, _AT_LEAST, _MAX_FAMILY, 0))
        _deny(library, context, "ioctl", _Comparison(1, _MASKED_EQUAL, 0xFFFFFFFF, _TIOCSTI))
        return _exported(library, context)
    finally:
        library.seccomp_release(context)


def restrict(program: bytes) -> None:
    """Apply a filter to this process, which must have a single thread, and to all that it starts."""
    whole = _Program(len(program) // _INSTRUCTION_BYTES, program)
    call("prctl", _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(whole), 0, 0)


def _library() -> Any:
    try:
        library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError:
        raise OSError(errno.ENOENT, "libseccomp is not installed") from None
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_attr_set.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32)
    library.seccomp_release.argtypes = (ctypes.c_void_p,)
    library.seccomp_export_bpf.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.seccomp_rule_add_array.argtypes = (
        ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Comparison),
    )  # fmt: skip
    return library


def _deny(library: Any, context: int, name: str, *conditions: _Comparison, number: int = errno.EPERM) -> None:
    syscall = library.seccomp_syscall_resolve_name(name.encode())
    if syscall < 0:
        return  # unknown to this version of the library, or not a call of this machine
    array = (_Comparison * len(conditions))(*conditions)
    if (code := library.seccomp_rule_add_array(context, _ERRNO | number, syscall, len(conditions), array)) < 0:
        raise OSError(-code, f"a rule for the system call {name}: {os.strerror(-code)}")


def _exported(library: Any, context: int) -> bytes:
    descriptor = os.memfd_create("seccomp")
    try:
        if (code := library.seccomp_export_bpf(context, descriptor)) < 0:
            raise OSError(-code, f"the filter of system calls: {os.strerror(-code)}")
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)
