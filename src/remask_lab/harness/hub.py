"""Whether the Hugging Face hub can be reached, found out in seconds: its own clients try for minutes."""

import logging
import socket
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies

import datasets.config
from huggingface_hub import constants

log = logging.getLogger(__name__)

SECONDS = 4.0


def go_offline_without_network() -> None:
    """Where the hub cannot be reached, have data sets come from its cache on this machine, or fail at once."""
    if constants.HF_HUB_OFFLINE or getproxies().get("https") or reachable(constants.ENDPOINT):
        return
    log.warning("%s cannot be reached: data sets come from the cache on this machine", constants.ENDPOINT)
    # Read by their packages when they are imported, so the variable of the environment comes too late.
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True


def reachable(url: str) -> bool:
    """Whether the host of `url` takes a connection within `SECONDS`, the look-up of its name included."""
    parts, found = urlsplit(url), threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname or "", parts.port or 443), SECONDS).close()
        except OSError:
            return
        found.set()

    # The look-up of a name knows no limit of time, so a thread that is not waited for makes it.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return found.is_set()
