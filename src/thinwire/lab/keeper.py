"""The process that holds a lab's namespaces, and the way into them; a script that needs the standard library alone.

``keep`` makes the namespaces and holds them until its standard input ends, which happens when the process that
started the lab closes it *or dies, of whatever*: then it kills what still runs inside and leaves, and the kernel
takes the networks away with it. So nothing of a lab has a name outside, and nothing can be left behind.

``enter`` becomes another program inside one host; ``each`` runs programs in one host after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

CLONE_NEWNS: Final = 0x0002_0000
CLONE_NEWUTS: Final = 0x0400_0000
CLONE_NEWUSER: Final = 0x1000_0000
CLONE_NEWNET: Final = 0x4000_0000
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x4_0000

SETTINGS: Final = {
    # bbr paces by its own measurements, which a shaped link of one queue leaves unsteady.
    "ipv4/tcp_congestion_control": "reno",
    # A training step leaves links idle while it computes; a window that shrinks meanwhile measures the pauses.
    "ipv4/tcp_slow_start_after_idle": "0",
    # What earlier connections have met says nothing about a link that has been reshaped since.
    "ipv4/tcp_no_metrics_save": "1",
    # Neighbour discovery would be counted as traffic.
    "ipv6/conf/default/disable_ipv6": "1",
}
"""Pinned in every network namespace, so that what a lab measures does not depend on its machine's settings."""

GRACE: Final = 2.0
"""Seconds between SIGTERM and SIGKILL for what still runs in a host when the lab ends."""


# -- system calls ----------------------------------------------------------------------------------------------


def _checked(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _unshare(flags: int, what: str) -> None:
    _checked(_libc().unshare(flags), what)


def _mount(source: str, target: str, flags: int) -> None:
    _checked(_libc().mount(source.encode(), target.encode(), None, flags, None), f"mount {source} on {target}")


# -- keep ------------------------------------------------------------------------------------------------------


def keep(request: dict[str, Any]) -> None:
    """Make the namespaces, say in one line of JSON where they are, hold them until standard input ends.

    Args:
        request: ``hosts``, the names of the hosts, and ``file``, the text of their ``/etc/hosts``.
    """
    inodes: set[int] = set()
    try:
        in_user_namespace = _own_namespaces()
        _replace("/etc/hosts", request["file"])
        switch = _network_namespace(None)
        hosts = [_network_namespace(name) for name in request["hosts"]]
    except OSError as error:
        _say({"errno": error.errno, "error": error.strerror, "what": error.filename})
        return
    inodes |= {os.fstat(network).st_ino for network, _ in (switch, *hosts)}
    _say({"user": in_user_namespace, "switch": switch, "hosts": hosts})
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        sys.stdin.read()
    _end_processes(inodes)


def _own_namespaces() -> bool:
    """Leave the machine's mount namespace; true if that took a user namespace, because we lack the right."""
    try:
        _unshare(CLONE_NEWNS | CLONE_NEWNET, "network namespace")
        in_user_namespace = False
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        user, group = os.geteuid(), os.getegid()
        _unshare(CLONE_NEWUSER, "user namespace")
        in_user_namespace = True
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            try:
                Path(f"/proc/self/{name}").write_text(text, encoding="utf-8")
            except OSError as refused:
                raise OSError(refused.errno, refused.strerror, "user namespace") from refused
        _unshare(CLONE_NEWNS | CLONE_NEWNET, "network namespace inside a user namespace")
    _mount("none", "/", MS_REC | MS_PRIVATE)
    return in_user_namespace


def _replace(path: str, text: str) -> None:
    """Show ``text`` as the file ``path`` inside the mount namespace; nothing stays outside."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="thinwire-hosts-") as file:
        file.write(text)
        file.flush()
        Path(file.name).chmod(0o644)
        _mount(file.name, path, MS_BIND)


def _network_namespace(name: str | None) -> tuple[int, int]:
    """Make a network namespace with the settings of a lab, and with a host name where one is given. Returns the
    descriptors of the network and of the name namespace."""
    _unshare(CLONE_NEWNET | CLONE_NEWUTS, "network namespace")
    if name is not None:
        socket.sethostname(name)
    for key, value in SETTINGS.items():
        with contextlib.suppress(FileNotFoundError):  # of a kernel without IPv6
            Path(f"/proc/sys/net/{key}").write_text(value, encoding="utf-8")
    return os.open("/proc/self/ns/net", os.O_RDONLY), os.open("/proc/self/ns/uts", os.O_RDONLY)


def _end_processes(inodes: set[int]) -> None:
    """End every process in the given network namespaces, those that ignore SIGTERM too."""
    deadline = time.monotonic() + GRACE
    number = signal.SIGTERM
    while processes := list(_processes(inodes)):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        # Once: a second SIGTERM makes some programs leave at once.
        while time.monotonic() < deadline and list(_processes(inodes)):
            time.sleep(0.02)
        number = signal.SIGKILL
        time.sleep(0.005)


def _processes(inodes: set[int]) -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.stat(f"/proc/{entry.name}/ns/net").st_ino in inodes:  # noqa: PTH116
                yield int(entry.name)


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


# -- enter -----------------------------------------------------------------------------------------------------


def _enter(namespaces: list[str]) -> None:
    descriptors = [os.open(path, os.O_RDONLY) for path in namespaces]
    for descriptor, path in zip(descriptors, namespaces, strict=True):
        _checked(_libc().setns(descriptor, 0), path)
        os.close(descriptor)


def enter(cores: list[int], namespaces: list[str], command: list[str]) -> None:
    """Become ``command`` inside namespaces and on some cores, in the working directory of the caller."""
    os.sched_setaffinity(0, cores)
    directory = str(Path.cwd())
    _enter(namespaces)
    os.chdir(directory)  # a mount namespace is entered at its root
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        raise SystemExit(127 if error.errno == errno.ENOENT else 126) from None


def each(namespaces: list[str]) -> None:
    """Run what standard input asks for, until one step fails; say in one line of JSON which did, and why.

    Standard input is a JSON list of steps: path of a network namespace, program and arguments, text for it to read.
    """
    steps = json.load(sys.stdin)
    _enter(namespaces)
    for number, (network, command, text) in enumerate(steps):
        _enter([network])
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            _say({"failed": number, "error": done.stderr})
            return
    _say({})


def main(arguments: list[str]) -> None:
    """Run ``keep REQUEST``, ``each PATH ...`` or ``enter CORE,... PATH ... -- COMMAND``."""
    if arguments[0] == "keep":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        keep(json.loads(arguments[1]))
    elif arguments[0] == "each":
        each(arguments[1:])
    else:
        split = arguments.index("--")
        enter([int(core) for core in arguments[1].split(",")], arguments[2:split], arguments[split + 1 :])


if __name__ == "__main__":
    main(sys.argv[1:])
