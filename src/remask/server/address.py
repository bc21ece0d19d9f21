"""The address that a server listens on. Nothing here imports PyTorch or the server, as a port is tried before these."""

import socket

from remask.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address and does not listen yet. Port 0 takes a free port.

    Raises `ConfigError` if the address is in use or does not belong to this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there: {cause}; take another port (0 takes a free "
            "one), or an address of this machine"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL at which clients reach a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
