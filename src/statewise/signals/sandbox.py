"""Run by the verifier 'code' as a script in a child process: gives up what a program needn't have, then becomes it.

sandbox.py SECONDS MEMORY_BYTES FILE_BYTES PROGRAM
"""

import os
import resource
import sys

PROCESSES = 64
OPEN_FILES = 64
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def limit(seconds: int, memory: int, files: int) -> None:
    """Bounds on processor time, address space, size of a file, processes and open files; no core dumps."""
    for name, value in (
        ("RLIMIT_CPU", seconds),
        ("RLIMIT_AS", memory),
        ("RLIMIT_FSIZE", files),
        ("RLIMIT_NPROC", PROCESSES),
        ("RLIMIT_NOFILE", OPEN_FILES),
        ("RLIMIT_CORE", 0),
    ):
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def leave_network() -> bool:
    """Move into a network namespace that holds nothing; False where the system does not let an ordinary user do so."""
    import ctypes

    try:
        return ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0
    except (AttributeError, OSError):
        return False


def main(arguments: list[str]) -> None:
    seconds, memory, files = (int(a) for a in arguments[:3])
    leave_network()
    limit(seconds, memory, files)
    os.execv(sys.executable, [sys.executable, "-I", "-S", arguments[3]])


if __name__ == "__main__":
    main(sys.argv[1:])
