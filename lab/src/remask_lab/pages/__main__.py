"""`python -m remask_lab pages NAME`: writes a page from the kept results."""

import argparse
import importlib
import sys

NAMES = ("real-weights", "results", "when-bicache")


def main() -> int:
    """Run the page's command that the first word names. Returns its status."""
    parser = argparse.ArgumentParser(prog="python -m remask_lab pages", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    name = parser.parse_args(sys.argv[1:2]).name
    status: int = importlib.import_module(f"remask_lab.pages.{name.replace('-', '_')}").main(sys.argv[2:])
    return status


if __name__ == "__main__":
    sys.exit(main())
