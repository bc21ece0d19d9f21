"""Options that say where a result goes: the numbers, pictures and a page."""

from typing import Any


def add_result_options(parser: Any) -> None:
    """Add the options for the numbers and for pictures."""
    add_output_option(parser)
    add_plots_option(parser)


def add_plots_option(parser: Any) -> None:
    """Add the option for pictures alone."""
    parser.add_argument("--plots", metavar="FOLDER", help="where pictures go; made if it is not there")


def add_output_option(parser: Any) -> None:
    """Add the option for the numbers alone."""
    parser.add_argument("--output", metavar="FILE", help="where the numbers go, as JSON")


def add_page_option(parser: Any) -> None:
    """Add the option for a page, of a subject whose outcome has one."""
    parser.add_argument("--page", metavar="FILE", help="where the page goes, as HTML")
