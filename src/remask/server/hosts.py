"""Names under which a server may be called.

A page of another site may give its own name this machine's address, and then calls as if it were a page of this server
(DNS rebinding); only the header `Host` tells.
"""

import ipaddress
from collections.abc import Iterable

ANY = "*"
LOOPBACK = "localhost"


class AllowedHosts:
    """The names that a server answers to: those of the loopback, and `names`; with `*` among these all.

    Addresses are no names: no page has one that is not the server's own. No browser sends a request without a `Host`.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset({LOOPBACK, *map(_plain, names)})

    def admit(self, header: str) -> bool:
        """Whether a request with this `Host`, a name with or without a port, may be answered."""
        host = _plain(header)
        return (
            ANY in self._names or not host or host in self._names or host.endswith(f".{LOOPBACK}") or _is_address(host)
        )


def _plain(host: str) -> str:
    """A host without its port and the dot at its end."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    if colon and ":" not in name and (port.isdecimal() or not port):
        host = name
    return host.removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
