"""A small network on one machine: hosts in network namespaces around a switch, each link with a capped rate.

    with capped_star(["rank0", "rank1", "reducer"], megabits=1000) as star:
        subprocess.Popen([*star.enter("rank0"), "ping", star.addresses["rank1"]])

The switch is a bridge in a namespace of its own, so that the machine's own network has nothing of it, and all is gone
with the namespaces. Linux, iproute2 and the rights of root are needed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["INTERFACE", "Hosts", "NotPermittedError", "capped_star", "lone_loopback"]

INTERFACE = "eth0"
"""Name of every host's own end of its link."""
_LIMIT = 20.0
_BURST = "256kb"  # more than the largest packet that is handed over whole, of 64 KiB
_LATENCY = "50ms"


class NotPermittedError(RuntimeError):
    """Namespaces, links between them or capped rates cannot be made here; the message says why."""


@dataclass(frozen=True)
class Hosts:
    """Where processes can be started.

    Attributes
    ----------
    addresses : dict of str to str
        IPv4 address by host.
    interface : str
        The network interface of each host.
    namespaces : dict of str to str
        Name of its namespace by host; empty if the hosts are this machine itself.
    """

    addresses: dict[str, str]
    interface: str
    namespaces: dict[str, str]

    def enter(self, host: str) -> list[str]:
        """What stands before a command line that is to run on that host; the process keeps its number."""
        return ["ip", "netns", "exec", self.namespaces[host]] if host in self.namespaces else []


@contextlib.contextmanager
def capped_star(hosts: Sequence[str], megabits: int) -> Iterator[Hosts]:
    """Hosts around a switch; each link carries ``megabits`` Mb/s at most, in each direction (a token bucket).

    All is taken down at the end, whatever happens. :class:`NotPermittedError` if it cannot be made.
    """
    with _namespaces([*hosts, "switch"]) as names:
        switch = names.pop("switch")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        addresses = {}
        for number, (host, name) in enumerate(names.items()):
            port = f"port{number}"
            addresses[host] = f"10.77.0.{number + 1}"
            peer = ("peer", "name", port, "netns", switch)
            _run("ip", "link", "add", INTERFACE, "netns", name, "type", "veth", *peer)
            _run("ip", "-n", name, "address", "add", f"{addresses[host]}/24", "dev", INTERFACE)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
            # Each end of a link caps what it sends.
            for where, device in ((name, INTERFACE), (switch, port)):
                rate = ("rate", f"{megabits}mbit", "burst", _BURST, "latency", _LATENCY)
                _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *rate)
                _run("ip", "-n", where, "link", "set", device, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield Hosts(addresses, INTERFACE, names)


@contextlib.contextmanager
def lone_loopback(hosts: Sequence[str]) -> Iterator[Hosts]:
    """All hosts on a loopback interface that nothing else uses; :class:`NotPermittedError` if it cannot be made."""
    with _namespaces(["lo"]) as names:
        _run("ip", "-n", names["lo"], "link", "set", "lo", "up")
        yield Hosts(dict.fromkeys(hosts, "127.0.0.1"), "lo", dict.fromkeys(hosts, names["lo"]))


@contextlib.contextmanager
def _namespaces(hosts: Sequence[str]) -> Iterator[dict[str, str]]:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NotPermittedError(f"there is no command {missing[0]!r}: install iproute2")
    if os.geteuid() != 0:
        raise NotPermittedError("network namespaces need the rights of root: run it as root, or in a container as one")
    names = {host: f"neuron-fabric-{os.getpid()}-{host}" for host in hosts}
    made: list[str] = []
    try:
        for name in names.values():
            made.append(name)  # before it is there: whatever interrupts this, it is looked for afterwards
            _run("ip", "netns", "add", name)
        yield dict(names)
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=_LIMIT, check=False)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=True)
    except subprocess.CalledProcessError as error:
        raise NotPermittedError(f"{' '.join(command)}: {error.stderr.strip() or error.returncode}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotPermittedError(f"{' '.join(command)}: {error}") from None
