"""`python -m remask_lab pages NAME`: writes a page from the kept results."""

import importlib
import sys

from remask_lab.speed.command import command_parser

NAMES = ("real-weights", "results", "when-bicache")


def main() -> int:
    """Write the page that the first word names. Returns the exit status."""
    parser = command_parser(__doc__, "pages")
    parser.add_argument("name", choices=NAMES)
    name = parser.parse_args(sys.argv[1:2]).name
    status: int = importlib.import_module(f"remask_lab.pages.{name.replace('-', '_')}").main(sys.argv[2:])
    return status


if __name__ == "__main__":
    sys.exit(main())
