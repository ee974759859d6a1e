"""Isolation of one process on Linux, by namespaces: a script that sets it up and becomes the command that it was given.

The process sees an empty network, no processes but its own, and a root of its own that holds the interpreter, the
system's libraries and a small /tmp; nothing of it but /tmp can be written. It is not root, has no capabilities, gets
none by running files, and can make no further user namespaces. It is not the first process of its namespace, with which
all others die: that one is out of its reach, and dies with the process that made the namespace.

Run by a fresh interpreter without anything but its standard library; argument: `{"binds": [PATH, ...], "scratch_bytes":
N, "command": [...]}`. Exits with 70 where the system does not permit it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import struct
import sys
from contextlib import suppress
from typing import Any, Final

NEW_MOUNTS, NEW_HOST_NAME, NEW_IPC, NEW_USER, NEW_PROCESSES, NEW_NETWORK = (
    *(0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000),
)
READ_ONLY, NO_SET_UID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH: Final = 2
MOUNT_SETATTR, HERE, ALL_BELOW = 442, -100, 0x8000
SEALED: Final = struct.pack("4Q", 1 | 2 | 4, 0, 0, 0)
"""For `mount_setattr`: read-only, no set-uid, no devices."""

DIE_WITH_PARENT, DUMPABLE, NO_NEW_PRIVILEGES = 1, 4, 38
NOBODY: Final = 65534
DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom")
PLACES: Final = ("/tmp", "/mnt", "/var")
"""Folders of which one becomes the root."""

NOT_PERMITTED: Final = 70

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: Any) -> None:
    """A function of the C library that returns 0 where it succeeds.

    Raises:
        OSError: it did not. NotImplementedError: this system has no such call.
    """
    converted = [
        value.encode() if isinstance(value, str) else ctypes.c_long(value) if isinstance(value, int) else value
        for value in args
    ]
    if getattr(libc, name)(*converted) != 0:
        number = ctypes.get_errno()
        if number == errno.ENOSYS:
            raise NotImplementedError(name)
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    call("mount", source, target, kind, ctypes.c_ulong(flags), data)


def seal(path: str) -> None:
    """Let nothing be written in a mounted folder, nor (from Linux 5.12 on) in what is mounted below it."""
    mount(None, path, None, BIND | REMOUNT | READ_ONLY | NO_SET_UID | NO_DEVICES)
    with suppress(NotImplementedError):
        call("syscall", MOUNT_SETATTR, HERE, path, ALL_BELOW, SEALED, len(SEALED))


def new_root(binds: list[str], scratch_bytes: int) -> None:
    """Make a root that holds the given folders, read-only, and an empty /tmp of so many bytes."""
    mount(None, "/", None, RECURSIVE | PRIVATE)
    # whatever is there is covered, for this process alone
    root = next(place for place in PLACES if os.path.isdir(place) and not any(path.startswith(place) for path in binds))
    mount("tmpfs", root, "tmpfs", NO_SET_UID | NO_DEVICES, "size=1m,mode=755")
    os.mkdir(root + "/tmp")
    mount("tmpfs", root + "/tmp", "tmpfs", NO_SET_UID | NO_DEVICES, f"size={scratch_bytes},nr_inodes=1024,mode=1777")
    for path in binds:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
            continue
        os.makedirs(root + path, exist_ok=True)
        mount(path, root + path, None, BIND | RECURSIVE)
        seal(root + path)
    os.mkdir(root + "/dev")
    for path in DEVICES:
        with open(root + path, "wb"):
            pass
        mount(path, root + path, None, BIND)
    os.chdir(root)
    call("pivot_root", ".", ".")
    call("umount2", ".", DETACH)
    mount(None, "/", None, BIND | REMOUNT | READ_ONLY | NO_SET_UID | NO_DEVICES)
    os.chdir("/tmp")


class Identity:
    """Who the process is inside: nobody, in a user namespace of its own."""

    def __init__(self) -> None:
        self.proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)  # is not there any more in the new root

    def write(self, path: str, text: str) -> None:
        file = os.open(path, os.O_WRONLY, dir_fd=self.proc)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)

    def claim(self, user: int, group: int) -> None:
        """Be nobody in the namespace just made; outside, this user and group."""
        self.write("self/setgroups", "deny")
        self.write("self/uid_map", f"{NOBODY} {user} 1")
        self.write("self/gid_map", f"{NOBODY} {group} 1")

    def give_up_root(self) -> None:
        """From root outside to nobody, outside too."""
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        call("prctl", DUMPABLE, 1, 0, 0, 0)  # or its files in /proc stay root's
        call("unshare", NEW_USER)
        self.claim(NOBODY, NOBODY)

    def close_door(self) -> None:
        with suppress(OSError):  # a read-only /proc; further namespaces then have no more rights than this one
            self.write("sys/user/max_user_namespaces", "0")
        os.close(self.proc)


def become(command: list[str], binds: list[str], scratch_bytes: int) -> None:
    """Run a command isolated, and exit as it does."""
    was_root, user, group = os.geteuid() == 0, os.geteuid(), os.getegid()
    os.umask(0o022)
    identity = Identity()
    spaces = NEW_MOUNTS | NEW_HOST_NAME | NEW_IPC | NEW_PROCESSES | NEW_NETWORK
    call("unshare", spaces if was_root else spaces | NEW_USER)
    if not was_root:
        identity.claim(user, group)
    call("prctl", DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    new_root(binds, scratch_bytes)
    watched, held = os.pipe()
    first = os.fork()  # of its namespace, all of which dies with it
    if first:
        os.close(watched)
        exit_as(first)
    os.close(held)
    if was_root:
        identity.give_up_root()
    identity.close_door()
    call("prctl", DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    os.set_blocking(watched, False)
    with suppress(BlockingIOError):
        os.read(watched, 1)
        os._exit(NOT_PERMITTED)  # the parent died before it could take this one along
    child = os.fork()
    if child:  # which could undo what makes it die, and must not be the first
        call("prctl", DUMPABLE, 0, 0, 0, 0)
        exit_as(child)
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    os.execve(command[0], command, {})


def exit_as(child: int) -> None:
    """Wait for a child, and for all others that end before it; end as it does."""
    ended, status = 0, 0
    while ended != child:
        ended, status = os.wait()
    os._exit(os.waitstatus_to_exitcode(status) & 255)


if __name__ == "__main__":
    try:
        become(**json.loads(sys.argv[1]))
    except (OSError, NotImplementedError, StopIteration) as error:
        print(error, file=sys.stderr)
        os._exit(NOT_PERMITTED)
