"""Which address of this host another host of the session can reach."""

from __future__ import annotations

import socket


def reachable_host(toward: str) -> str:
    """The address that this host uses toward another one; nothing is sent. The loopback's where it cannot be told."""
    try:
        family, _, _, _, place = socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
