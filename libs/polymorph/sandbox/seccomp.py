"""A system call filter for the time that untrusted code runs: what the harness around it needs and no more."""

import ctypes
import os
import platform
import struct

_NAMES = (
    "read", "write", "close", "mmap", "mprotect", "munmap", "brk", "mremap", "madvise", "rt_sigprocmask",
    "rt_sigreturn", "sched_yield", "nanosleep", "clock_nanosleep", "clock_gettime", "gettimeofday", "getpid",
    "gettid", "futex", "sched_getaffinity", "recvmsg", "sendmsg", "recvfrom", "sendto", "fstat", "exit",
    "exit_group", "restart_syscall", "rseq", "membarrier",
    "set_robust_list",
)  # fmt: skip
_NUMBERS = {
    "x86_64": (
        0, 1, 3, 9, 10, 11, 12, 25, 28, 14, 15, 24, 35, 230, 228, 96, 39, 186, 202, 204, 47, 46, 45, 44, 5, 60,
        231, 219, 334, 324,
        273,
    ),
    "aarch64": (
        63, 64, 57, 222, 226, 215, 214, 216, 233, 135, 139, 124, 101, 115, 113, 169, 172, 178, 98, 123, 212, 211,
        207, 206, 80, 93, 94, 128, 293, 283, 99,
    ),
}  # fmt: skip
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP_CALL = {"x86_64": 317, "aarch64": 277}

_SET_MODE_FILTER = 1
_FLAG_TSYNC = 1
_PR_SET_NO_NEW_PRIVS = 38
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _RETURN = 0x20, 0x15, 0x35, 0x06
_X32_BIT = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def available() -> bool:
    """Whether this kernel and architecture take our filter."""
    if platform.machine() not in _NUMBERS:
        return False
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:  # noqa: PTH123
        return "Seccomp_filters:" in status.read()


def lock() -> None:
    """Kills this process, all its threads, at the first system call that is not on the list.

    Raises:
        OSError: the kernel refused.
    """
    machine = platform.machine()
    program = _assemble(_AUDIT_ARCH[machine], _NUMBERS[machine])
    argument = _Program(len(program) // 8, program)
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(no_new_privs)")
    number = _SECCOMP_CALL[machine]
    _checked(_libc.syscall(number, _SET_MODE_FILTER, _FLAG_TSYNC, ctypes.byref(argument)), "seccomp")


def _assemble(arch: int, numbers: tuple[int, ...]) -> bytes:
    def step(code: int, then: int, otherwise: int, value: int) -> bytes:
        return struct.pack("<HBBI", code, then, otherwise, value)

    count = len(numbers)
    body = [
        step(_LOAD, 0, 0, 4),
        step(_JUMP_EQUAL, 1, 0, arch),
        step(_RETURN, 0, 0, _KILL_PROCESS),
        step(_LOAD, 0, 0, 0),
        step(_JUMP_ABOVE, count, 0, _X32_BIT),
        *(step(_JUMP_EQUAL, count - index, 0, number) for index, number in enumerate(numbers)),
        step(_RETURN, 0, 0, _KILL_PROCESS),
        step(_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(body)


def _checked(result: int, call: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")
