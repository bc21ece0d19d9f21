"""The program of a rank other than 0: `python -m remask.parallel FD [--json]`, where FD is a connection to rank 0.

It logs warnings and errors, with `--json` as objects of JSON.
"""

import logging
import os
import sys

from remask.machine.log_format import TEXT, JsonFormatter
from remask.parallel.lead import JSON
from remask.parallel.worker import main

log = logging.getLogger(__name__)

if __name__ == "__main__":
    text = TEXT.replace("%(message)s", f"rank process {os.getpid()}: %(message)s")
    logging.basicConfig(level=logging.WARNING, format=text)
    if JSON in sys.argv[2:]:
        logging.getLogger().handlers[0].setFormatter(JsonFormatter())
    # Memory goes back with the process. To take a group down in order would wait for ranks that are gone.
    try:
        main(int(sys.argv[1]))
    except Exception as error:
        log.critical("ends with %s: %s", type(error).__name__, error)
        os._exit(1)
    os._exit(0)
