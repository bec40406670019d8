"""The namespaces of a lab, seen from the process that owns it: a keeper makes them, a command prefix enters them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from thinwire.errors import UsageError

_KEEPER: Final = [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py"))]

_TOOL_PATH: Final = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
"""Directories that may hold ``ip`` and ``tc``; the search path of an ordinary user often lacks some of them."""

_TIMEOUT: Final = 60.0
"""Seconds until a step that normally takes milliseconds fails."""


@dataclass(frozen=True)
class Step:
    """Lines for ``ip -batch`` or ``tc -batch``, in a host, or with None in the namespace of the switches."""

    tool: Literal["ip", "tc"]
    lines: Sequence[str]
    host: int | None = None


class Namespaces:
    """A switch's network namespace and one for each host, until :meth:`close` or until this process ends.

    Raises:
        UsageError: the machine does not allow it; says what is missing.
    """

    def __init__(self, hosts: Sequence[str], hosts_file: str) -> None:
        self._tools = {name: _tool(name) for name in ("ip", "tc")}
        request = json.dumps({"hosts": list(hosts), "file": hosts_file})
        self._keeper = subprocess.Popen(
            [*_KEEPER, "keep", request],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for the lab's owner: the keeper ends after it.
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        answer: dict[str, Any] = json.loads(self._keeper.stdout.readline() or "{}")
        if "hosts" not in answer:
            self.close()
            raise UsageError(_refusal(answer))
        self.in_user_namespace: bool = answer["user"]
        self._hosts: list[tuple[int, int]] = answer["hosts"]
        self._switch: tuple[int, int] = answer["switch"]

    def close(self) -> None:
        """End every process in the hosts and give the namespaces up; safe to call twice."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.close()
        self._keeper.wait()
        self._keeper.stdout.close()

    def network(self, host: int) -> str:
        """The path of a host's network namespace, valid for as long as the lab is."""
        return self._place(host)[0]

    def enter(self, host: int | None, cores: Iterable[int]) -> list[str]:
        """The words to put before a command that is to run inside: in a host, or with ``None`` beside the switches."""
        network, name = self._place(host)
        return [*_KEEPER, "enter", ",".join(map(str, cores)), *self._shared(), name, network, "--"]

    def perform(self, steps: Sequence[Step]) -> None:
        """Have ``ip`` and ``tc`` perform commands, step by step.

        Raises:
            UsageError: a command was refused; says which, and why. The steps after it are not performed.
        """
        steps = [step for step in steps if step.lines]
        asked = [
            (self._place(step.host)[0], [self._tools[step.tool], "-batch", "-"], "\n".join(step.lines) + "\n")
            for step in steps
        ]
        done = subprocess.run(
            [*_KEEPER, "each", *self._shared()],
            input=json.dumps(asked),
            stdout=subprocess.PIPE,
            text=True,
            timeout=_TIMEOUT,
            check=True,
        )
        answer = json.loads(done.stdout)
        if answer:
            raise UsageError(_unsupported(steps[answer["failed"]], answer["error"]))

    def show(self, host: int | None, *arguments: str) -> Any:
        """What ``ip -json`` reports, decoded: in a host, or with ``None`` beside the switches."""
        command = [*self.enter(host, os.sched_getaffinity(0)), self._tools["ip"], "-json", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
        return json.loads(done.stdout)

    def _place(self, host: int | None) -> tuple[str, str]:
        """Paths of a network and of a name namespace."""
        if self._keeper.poll() is not None:
            raise UsageError(f"the lab's networks are gone: process {self._keeper.pid}, which kept them, has ended")
        network, name = self._switch if host is None else self._hosts[host]
        return f"/proc/{self._keeper.pid}/fd/{network}", f"/proc/{self._keeper.pid}/fd/{name}"

    def _shared(self) -> list[str]:
        """Paths of the namespaces that all hosts are in."""
        names = ("user", "mnt") if self.in_user_namespace else ("mnt",)
        return [f"/proc/{self._keeper.pid}/ns/{name}" for name in names]


def _tool(name: str) -> str:
    path = shutil.which(name, path=_TOOL_PATH)
    if path is None:
        raise UsageError(
            f"lab: the program {name!r} is missing: install iproute2 (apt-get install iproute2, dnf install iproute-tc)"
        )
    return path


def _refusal(answer: dict[str, Any]) -> str:
    """Why the keeper could not make namespaces, from the step that failed and its error number."""
    what, number = str(answer.get("what", "its keeper")), answer.get("errno")
    failure = f"lab: {what}: {answer.get('error', 'ended without a message')}"
    if "user namespace" in what:
        who = "root without CAP_SYS_ADMIN" if os.geteuid() == 0 else f"user {os.geteuid()}"
        return (
            f"{failure}: as {who} a lab needs user namespaces, and this kernel or container does not allow them; run "
            "it as root, give the container CAP_SYS_ADMIN and CAP_NET_ADMIN (docker run --privileged), or allow them: "
            "sysctl user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1 "
            "kernel.apparmor_restrict_unprivileged_userns=0 (those of them that this system has)"
        )
    if number in {errno.EPERM, errno.EACCES}:
        return (
            f"{failure}: a lab needs the rights to make network and mount namespaces; run it as root with "
            "CAP_SYS_ADMIN and CAP_NET_ADMIN (in a container: docker run --privileged)"
        )
    if number in {errno.EINVAL, errno.ENOSYS}:
        return f"{failure}: this kernel was built without it (CONFIG_NET_NS, CONFIG_UTS_NS); use another kernel"
    if number == errno.ENOSPC:
        return f"{failure}: the limit is reached; raise it: sysctl user.max_net_namespaces=10000"
    return f"{failure}; this machine cannot hold a lab"


_FEATURES: Final = (
    ("netem", "latency needs the kernel's netem queue", "CONFIG_NET_SCH_NETEM", "sch_netem"),
    ("clsact", "loss needs the kernel's clsact queue", "CONFIG_NET_SCH_INGRESS", "sch_ingress"),
    ("bpf", "loss needs the kernel's BPF classifier", "CONFIG_NET_CLS_BPF", "cls_bpf"),
    ("tbf", "bandwidth needs the kernel's tbf queue", "CONFIG_NET_SCH_TBF", "sch_tbf"),
    ("type bridge", "hosts are joined by the kernel's bridge", "CONFIG_BRIDGE", "bridge"),
    ("type veth", "hosts are connected by the kernel's virtual cables", "CONFIG_VETH", "veth"),
)
"""Features that a kernel may lack: word of the command, meaning, kernel option, module."""


def _unsupported(step: Step, errors: str) -> str:
    tool, lines = step.tool, step.lines
    messages = [line.strip() for line in errors.splitlines() if line.strip()]
    number = next((int(line.rsplit(":", 1)[1]) for line in messages if line.startswith("Command failed")), None)
    line = lines[number - 1] if number else "; ".join(lines)
    why = next(iter(messages), "no reason given").removeprefix("Error: ").rstrip(".")
    for word, meaning, option, module in _FEATURES:
        if word in line and any(hint in errors for hint in ("unknown", "Unknown", "not supported", "No such file")):
            advice = f"load it (modprobe {module}) or use a kernel with {option}"
            if meaning.startswith(("latency", "loss")):
                advice += f"; or leave out {meaning.partition(' ')[0]}"
            return f"lab: {meaning}, which this one lacks: {tool} {line}: {why}; {advice}"
    return f"lab: {tool} {line}: {why}"
