"""Two network namespaces with a wire between them: for the processes in them, two hosts without
shared memory. Knows no product.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Wire:
    """A wire to another namespace `name`, with devices and addresses of both ends; our end is near
    and `here`."""

    name: str
    near: str
    far: str
    here: str
    there: str

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Drop all packets between the hosts without notice: each sees the other as a dead
        machine."""
        ends = ((("-n", self.name), self.here, self.far), ((), self.there, self.near))
        nobody = ("lladdr", "02:00:00:00:00:01", "nud", "permanent")
        for where, address, device in ends:
            ip(*where, "neigh", "replace", address, *nobody, "dev", device)
        try:
            yield
        finally:
            for where, address, device in ends:
                ip(*where, "neigh", "del", address, "dev", device)


@contextlib.contextmanager
def second_host(subnet: str) -> Iterator[Wire]:
    """`subnet`: the first three numbers, unused on this machine. Skips without the rights."""
    name = f"baton-{os.getpid()}"
    near, far = f"bt{os.getpid() % 10**6}a", f"bt{os.getpid() % 10**6}b"
    here, there = f"{subnet}.1", f"{subnet}.2"
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"NOT TESTED: no network namespaces for this user: {error}")
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        ip("addr", "add", f"{here}/30", "dev", near)
        ip("link", "set", near, "up")
        for device in (far, "lo"):
            ip("-n", name, "link", "set", device, "up")
        ip("-n", name, "addr", "add", f"{there}/30", "dev", far)
        yield Wire(name, near, far, here, there)
    finally:
        ip("netns", "del", name)  # deletes both ends of the wire
