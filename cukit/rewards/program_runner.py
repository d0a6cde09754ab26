"""Runs one program that a model wrote, in a process that has given up what it can (see programs.py). A script.

It gives up, as far as the system knows the means: processor time, memory, the size of files, core dumps (everywhere);
the network, the sight of other processes and the right to start many (Linux: namespaces of its own); other programs,
files but Python's and its own folder's (Linux: Landlock); and it ends with the process that started it.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
import sysconfig
import types

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000  # user, process ids, network, System V's shared memory
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on every architecture
READ = 1 << 2 | 1 << 3  # files, folders
ACCESS = {1: (1 << 13) - 1, 2: (1 << 14) - 1}  # all that a version of Landlock can hold; from 3 on truncation too
MOST_PROCESSES = 32
READABLE = ("/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
STARTED_BY = os.getuid()
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def limit(cpu_seconds: int, memory: int, file_size: int) -> None:
    for name, most in (
        ("RLIMIT_CPU", cpu_seconds),
        ("RLIMIT_AS", memory),
        ("RLIMIT_DATA", memory),
        ("RLIMIT_FSIZE", file_size),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NOFILE", 64),
    ):
        try:
            resource.setrlimit(getattr(resource, name), (most, most))
        except (ValueError, OSError, AttributeError):  # the system has a lower limit, or not this one
            pass


def end_with(libc: ctypes.CDLL, starter: int) -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter:
        os._exit(1)


def leave_namespaces(libc: ctypes.CDLL) -> bool:
    """Go on as a child that is alone: it sees no other process, and no network device that is up."""
    if libc.unshare(NAMESPACES) != 0:
        return False
    alive, held_open = os.pipe()
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(held_open)
    if select.select([alive], [], [], 0)[0]:  # the parent died before that
        os._exit(1)
    os.close(alive)
    # In this namespace the processes of the user outside do not count.
    resource.setrlimit(resource.RLIMIT_NPROC, (MOST_PROCESSES, MOST_PROCESSES))
    return True


def leave_files(libc: ctypes.CDLL) -> bool:
    """Landlock: no program may be run, nothing but `readable` be read, nothing but this folder be written."""
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return False
    everything = ACCESS.get(version, (1 << 15) - 1)
    handled = ctypes.c_uint64(everything)
    rules = libc.syscall(LANDLOCK_CREATE, ctypes.byref(handled), ctypes.c_size_t(8), ctypes.c_uint32(0))
    if rules < 0:
        return False
    python = {sys.base_prefix, sys.prefix, *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))}
    may = {path: READ for path in (*READABLE, *python)}
    may |= {path: READ | 1 << 1 for path in DEVICES} | {os.getcwd(): everything & ~1}
    for path, access in may.items():
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        access &= everything if os.path.isdir(path) else (1 << 1 | 1 << 2)
        rule = access.to_bytes(8, sys.byteorder) + descriptor.to_bytes(4, sys.byteorder)
        libc.syscall(LANDLOCK_ADD, rules, 1, ctypes.c_char_p(rule), ctypes.c_uint32(0))
        os.close(descriptor)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    held = libc.syscall(LANDLOCK_RESTRICT, rules, ctypes.c_uint32(0)) == 0
    os.close(rules)
    return held


def lock(starter: int) -> dict[str, bool]:
    """What the process is held back from now."""
    alone = files = False
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None, use_errno=True)
        end_with(libc, starter)
        alone, files = leave_namespaces(libc), leave_files(libc)
    # The kernel counts no processes of root.
    return {"network": alone, "files": files, "other processes": alone, "many processes": alone and STARTED_BY != 0}


def run(source: str, name: str) -> types.ModuleType:
    """The program as a module, which other parts of Python can find under its name."""
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, "program.py", "exec"), module.__dict__)
    return module


def main() -> None:
    mode, (cpu_seconds, memory, file_size, starter) = sys.argv[1], map(int, sys.argv[2:6])
    sys.argv[:] = ["program.py"]
    limit(cpu_seconds, memory, file_size)
    held = lock(starter)
    if mode == "locks":
        print(json.dumps(held))
        return
    with open("program.py", encoding="utf-8") as file:
        source = file.read()
    if mode == "input":
        run(source, "__main__")
        return
    job, output = json.loads(sys.stdin.read()), os.dup(1)
    module = run(source, "solution")
    exec(compile(job["test"], "test", "exec"), module.__dict__)
    os.write(output, b"\n" + job["word"].encode())


if __name__ == "__main__":
    main()
