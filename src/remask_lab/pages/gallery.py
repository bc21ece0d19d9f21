"""Writes docs/gallery.md from docs/gallery/entries.toml, and draws the pictures by the commands in that file.

    python -m remask_lab.pages.gallery                 # write the page
    python -m remask_lab.pages.gallery --draw [TEXT]   # first run the commands of pictures whose name contains TEXT

An entry has a picture below docs/gallery, the command that makes it in the root of a checkout, and a reading.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from remask.cli.commands import missing
from remask.errors import ConfigError, RemaskError, UnknownNameError
from remask.machine.disk import write_whole
from remask_lab.speed.command import REMASK

ROOT = Path(__file__).parents[3]
GROUPS = ("The caches beside each other", "BiCache", "dKV-Cache", "dLLM-Cache", "Uniform models", "The engine")
LARGEST = 100_000  # bytes of a picture
COLORS = (192, 64, 32)  # sizes of palettes; the first that makes a picture small enough is taken
HEAD = """# Gallery

The papers' figures, measured on the models that come with the package. These are small models of narrow tasks: the
pictures show that a measurement works and what it looks like, not what a model of 8B would show. Below each picture is
the command that made it. Run it in the root of a checkout; `--model` takes any other model.
`python -m remask_lab.pages.gallery` writes this page.
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture.

    Attributes:
        picture: its path below docs/gallery.
        group: the heading of its section.
        title: its subject.
        source: the published figures and tables that it answers.
        command: the command that makes it.
        reading: what it shows.
    """

    picture: str
    group: str
    title: str
    source: str
    command: str
    reading: str


def main(argv: Sequence[str] | None = None) -> int:
    """Draw pictures where `--draw` asks for it, and write the page. Returns 0, or 2 on an error."""
    parser = argparse.ArgumentParser(
        prog="python -m remask_lab.pages.gallery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--draw", nargs="?", const="", metavar="TEXT", help="make the pictures whose name contains TEXT"
    )
    parser.add_argument("--root", default=str(ROOT), metavar="FOLDER", help="of the checkout (default: this one)")
    args = parser.parse_args(argv)
    root = Path(args.root)
    try:
        entries = read_entries(root / "docs" / "gallery" / "entries.toml")
        if args.draw is not None:
            draw(entries, args.draw, root)
        write_whole("the page", root / "docs" / "gallery.md", page(entries))
    except RemaskError as error:
        print(f"remask_lab.pages.gallery: error: {error}", file=sys.stderr)
        return 2
    return 0


def read_entries(path: Path) -> list[Picture]:
    """Read the gallery's entries in their order. Raises `ConfigError` where the file or an entry is invalid."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))["entries"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path.name} is no list of entries: {error}") from error
    known = [field.name for field in fields(Picture)]
    entries = []
    for number, item in enumerate(raw, start=1):
        for key in item:
            if key not in known:
                raise UnknownNameError(f"key of entry {number}", key, known)
        missing = [key for key in known if not item.get(key)]
        if missing:
            raise ConfigError(f"entry {number} of {path.name} has no {', '.join(missing)}")
        entries.append(Picture(**item))
    _check(entries)
    return entries


def page(entries: Sequence[Picture]) -> str:
    """Returns the page in Markdown."""
    parts = [HEAD.rstrip()]
    for group in GROUPS:
        own = [entry for entry in entries if entry.group == group]
        parts += [f"## {group}"] if own else []
        for entry in own:
            parts += [
                f"### {entry.title}",
                f"![{entry.title}](gallery/{entry.picture})",
                f"{entry.reading.strip()} ({entry.source})",
                f"```\n{entry.command}\n```",
            ]
    return "\n\n".join(parts) + "\n"


def draw(entries: Sequence[Picture], text: str, root: Path) -> None:
    """Run each command that makes a picture whose name contains `text` once. Other pictures that it makes are removed.

    Raises `ConfigError` where a command fails, does not make its picture, or makes one that is too large.
    """
    folder = root / "docs" / "gallery"
    commands = dict.fromkeys(entry.command for entry in entries if text in entry.picture)
    if not commands:
        raise ConfigError(f"no picture's name contains {text!r}; there are {', '.join(e.picture for e in entries)}")
    for command in commands:
        own = {folder / entry.picture for entry in entries if entry.command == command}
        for picture in own:
            picture.parent.mkdir(parents=True, exist_ok=True)
        print(f"$ {command}", flush=True)
        words = [*REMASK, "--quiet", *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=root, env=dict(os.environ), stdout=subprocess.DEVNULL)
        if done.returncode:
            raise ConfigError(f"the command failed with status {done.returncode}: {command}")
        for extra in {path for picture in own for path in picture.parent.glob("*.png")} - _pictures(entries, folder):
            extra.unlink()
        for picture in sorted(own):
            _reduce(picture)


def _pictures(entries: Sequence[Picture], folder: Path) -> set[Path]:
    return {folder / entry.picture for entry in entries}


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


def _check(entries: Sequence[Picture]) -> None:
    for entry in entries:
        if entry.group not in GROUPS:
            raise UnknownNameError(f"group of {entry.picture}", entry.group, GROUPS)
        if not entry.command.startswith("remask "):
            raise ConfigError(f"{entry.picture}: its command must be one of remask, got {entry.command!r}")
    pictures = [entry.picture for entry in entries]
    if len(set(pictures)) != len(pictures):
        raise ConfigError("two entries have one picture")


if __name__ == "__main__":
    sys.exit(main())
