"""The gallery: every picture is there, small, and made by a command that the real parser takes."""

import shlex
from pathlib import Path

import pytest
from PIL import Image

from remask.cli.main import parse
from remask.errors import ConfigError
from remask_lab.pages import gallery
from remask_lab.pages.gallery import Picture, page, read_entries
from remask_lab.pages.page import ROOT

FOLDER = ROOT / "docs" / "lab" / "gallery"
ENTRIES = read_entries(FOLDER / "entries.toml")
ENTRY = '''
[[entries]]
picture = "one/depth.png"
group = "BiCache"
title = "Depth"
source = "figure 5"
command = """remask profile --model llada-tiny --load-format dummy --dtype float32 --canvas 64 --samples 1 \\
--plot docs/lab/gallery/one/depth.png"""
reading = "It rises."
'''


def test_the_committed_page_is_made_from_the_entries() -> None:
    assert page(ENTRIES) == (ROOT / "docs" / "lab" / "gallery.md").read_text(encoding="utf-8"), (
        "run python -m remask_lab pages gallery"
    )


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.picture)
def test_a_picture_and_its_command(entry: Picture) -> None:
    picture = FOLDER / entry.picture
    assert picture.stat().st_size < gallery.LARGEST
    with Image.open(picture) as image:
        assert image.format == "PNG"
        assert image.width > 400
    words = shlex.split(entry.command)
    assert words[0] == "remask"
    assert parse(words[1:]).run
    target = Path("docs/lab/gallery", entry.picture)
    assert {target, target.parent} & set(map(Path, words)), "the command puts it where the page looks for it"


def test_every_picture_has_an_entry() -> None:
    assert {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.png")} == {e.picture for e in ENTRIES}


def checkout(folder: Path, entries: str = ENTRY) -> Path:
    """The root of a checkout with a gallery of its own."""
    (folder / "docs" / "lab" / "gallery" / "one").mkdir(parents=True, exist_ok=True)
    (folder / "docs" / "lab" / "gallery" / "entries.toml").write_text(entries, encoding="utf-8")
    return folder


@pytest.mark.thorough
def test_pictures_are_drawn_by_their_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = checkout(tmp_path)
    stray = root / "docs" / "lab" / "gallery" / "one" / "stray.png"
    stray.write_bytes(b"of no entry")
    assert gallery.main(["--root", str(root), "--draw"]) == 0
    assert "$ remask profile " in capsys.readouterr().out
    with Image.open(root / "docs" / "lab" / "gallery" / "one" / "depth.png") as image:
        assert image.mode == "P", "reduced to a palette"
    assert not stray.exists()
    text = (root / "docs" / "lab" / "gallery.md").read_text(encoding="utf-8")
    assert "## BiCache\n\n### Depth\n\n![Depth](gallery/one/depth.png)\n\nIt rises. (figure 5)\n\n```\nremask " in text
    assert "## dKV-Cache" not in text


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("--plot docs/lab/gallery/one/depth.png", "--plot docs/lab/gallery/one/other.png", "did not make"),
        ("--samples 1", "--samples 0", "the command failed with status 2: remask profile"),
    ],
)
def test_commands_that_make_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    assert gallery.main(["--root", str(checkout(tmp_path, ENTRY.replace(old, new))), "--draw", "depth"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.thorough
def test_a_picture_that_is_too_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gallery, "LARGEST", 100)
    assert gallery.main(["--root", str(checkout(tmp_path)), "--draw"]) == 2
    assert "a picture has less than 100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("", "is no list of entries: 'entries'"),
        ("[[", "is no list of entries"),
        (ENTRY.replace('title = "Depth"\n', ""), "entry 1 of entries.toml has no title"),
        (ENTRY.replace("title", "tittle"), "Unknown key of entry 1 'tittle'. Did you mean 'title'?"),
        (ENTRY.replace("BiCache", "BiCash"), "Unknown group of one/depth.png 'BiCash'. Did you mean 'BiCache'?"),
        (ENTRY.replace("remask profile", "rm -r"), "its command must be one of remask, got 'rm -r"),
        (ENTRY + ENTRY, "two entries have one picture"),
    ],
)
def test_what_an_entry_cannot_say(tmp_path: Path, entries: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_entries(checkout(tmp_path, entries) / "docs" / "lab" / "gallery" / "entries.toml")
    assert message in str(caught.value)


def test_no_such_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gallery.main(["--root", str(checkout(tmp_path)), "--draw", "breadth"]) == 2
    assert "no picture's name contains 'breadth'; there are one/depth.png" in capsys.readouterr().err
