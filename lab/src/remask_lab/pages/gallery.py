"""Writes docs/lab/gallery.md from docs/lab/gallery/entries.toml, and draws the pictures by the commands in that file.

    python -m remask_lab pages gallery                 # write the page
    python -m remask_lab pages gallery --draw [TEXT]   # first run the commands of pictures whose name contains TEXT

An entry has a picture below docs/lab/gallery, the command that makes it in the root of a checkout, and a reading.
"""

import argparse
import os
import shlex
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from remask.cli.commands import missing
from remask.errors import ConfigError, UnknownNameError
from remask.machine.disk import write_whole
from remask_lab.pages.page import NOTEBOOK, ROOT, fill, page_parser, run_page
from remask_lab.speed.command import REMASK

GROUPS = ("The caches beside each other", "BiCache", "dKV-Cache", "dLLM-Cache", "Uniform models", "The engine")
LARGEST = 100_000  # bytes of a picture
COLORS = (192, 64, 32)  # sizes of palettes; the first that makes a picture small enough is taken


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: its path below docs/lab/gallery, what it shows, and the figures of papers that it answers."""

    picture: str
    group: str
    title: str
    source: str
    command: str
    reading: str


def main(argv: Sequence[str] | None = None) -> int:
    """Draw pictures where `--draw` asks for it, and write the page. Returns 0, or 2 on an error."""
    parser = page_parser("gallery", __doc__)
    parser.add_argument(
        "--draw", nargs="?", const="", metavar="TEXT", help="make the pictures whose name contains TEXT"
    )
    parser.add_argument("--root", default=str(ROOT), metavar="FOLDER", help="of the checkout (default: this one)")
    return run_page(_run, parser, argv)


def _run(args: argparse.Namespace) -> None:
    root = Path(args.root)
    entries = read_entries(root / NOTEBOOK / "gallery" / "entries.toml")
    if args.draw is not None:
        draw(entries, args.draw, root)
    write_whole("the page", root / NOTEBOOK / "gallery.md", page(entries))


def read_entries(path: Path) -> list[Picture]:
    """Read the gallery's entries in their order. Raises `ConfigError` where the file or an entry is invalid."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))["entries"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path.name} is no list of entries: {error}") from error
    known = [field.name for field in fields(Picture)]
    entries: list[Picture] = []
    for number, item in enumerate(raw, start=1):
        for key in item:
            if key not in known:
                raise UnknownNameError(f"key of entry {number}", key, known)
        absent = [key for key in known if not item.get(key)]
        if absent:
            raise ConfigError(f"entry {number} of {path.name} has no {', '.join(absent)}")
        entry = Picture(**item)
        if entry.group not in GROUPS:
            raise UnknownNameError(f"group of {entry.picture}", entry.group, GROUPS)
        if not entry.command.startswith("remask "):
            raise ConfigError(f"{entry.picture}: its command must be one of remask, got {entry.command!r}")
        if any(entry.picture == other.picture for other in entries):
            raise ConfigError(f"two entries have one picture, {entry.picture}")
        entries.append(entry)
    return entries


def page(entries: Sequence[Picture]) -> str:
    """Returns the page in Markdown."""
    return fill("gallery", groups=GROUPS, entries=entries)


def draw(entries: Sequence[Picture], text: str, root: Path) -> None:
    """Run each command that makes a picture whose name contains `text` once. Other pictures that it makes are removed.

    Raises `ConfigError` where a command fails, does not make its picture, or makes one that is too large.
    """
    folder = root / NOTEBOOK / "gallery"
    commands = dict.fromkeys(entry.command for entry in entries if text in entry.picture)
    if not commands:
        raise ConfigError(f"no picture's name contains {text!r}; there are {', '.join(e.picture for e in entries)}")
    for command in commands:
        own = sorted({folder / entry.picture for entry in entries if entry.command == command})
        for picture in own:
            picture.parent.mkdir(parents=True, exist_ok=True)
        print(f"$ {command}", flush=True)
        words = [*REMASK, "--quiet", *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=root, env=dict(os.environ), stdout=subprocess.DEVNULL)
        if done.returncode:
            raise ConfigError(f"the command failed with status {done.returncode}: {command}")
        known = {folder / entry.picture for entry in entries}
        for extra in {path for picture in own for path in picture.parent.glob("*.png")} - known:
            extra.unlink()
        for picture in own:
            _reduce(picture)


def _reduce(picture: Path) -> None:
    """Reduce a picture to a palette. Raises `ConfigError` if Pillow is missing, or the picture stays too large."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise missing(error, "lab") from error
    if not picture.is_file():
        raise ConfigError(f"the command did not make {str(picture)!r}")
    with Image.open(picture) as image:
        full = image.convert("RGB")
    for colors in COLORS:
        full.quantize(colors, dither=Image.Dither.NONE).save(picture, optimize=True)
        if picture.stat().st_size < LARGEST:
            return
    raise ConfigError(f"{str(picture)!r} has {picture.stat().st_size} bytes; a picture has less than {LARGEST}")
