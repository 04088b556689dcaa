"""Landlock through its three system calls: which files a process may still open."""

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE = 1 << 14
_V1 = (1 << 13) - 1
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
READ = _READ_FILE | _READ_DIR
RUN = READ | _EXECUTE
EVERYTHING = (1 << 15) - 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def version() -> int:
    """The kernel's Landlock ABI, 0 where it has none."""
    return max(0, int(_libc.syscall(_CREATE, None, 0, _VERSION_FLAG)))


def restrict(rules: Iterable[tuple[Path, int]]) -> None:
    """From now on this thread and what it starts open only what `rules` grant; TCP and signals outward are shut where
    the kernel can.

    Raises:
        OSError: the kernel refused.
    """
    abi = version()
    handled = _V1 | (1 << 13 if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    attributes = _Ruleset(handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _checked(_libc.syscall(_CREATE, ctypes.byref(attributes), size, 0), "landlock_create_ruleset")
    try:
        for path, allowed in rules:
            _allow(ruleset, path, allowed & handled)
        _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(no_new_privs)")
        _checked(_libc.syscall(_RESTRICT, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, allowed: int) -> None:
    if not path.exists():
        return
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        access = allowed if path.is_dir() else allowed & _FOR_FILES
        rule = _PathBeneath(access, parent)
        result = _libc.syscall(_ADD, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
        _checked(result, f"landlock_add_rule({path})")
    finally:
        os.close(parent)


def _checked(result: int, call: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")
    return int(result)
