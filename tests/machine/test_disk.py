"""Files that are written keep what they held, whatever happens meanwhile."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from remask.errors import ConfigError, OutputError, RecordError
from remask.machine.disk import LineFile, whole_file, write_whole
from tests.disks import small_disk
from tests.waiting import eventually


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_whole("the result", path, "é")

    def interrupted() -> None:
        with whole_file("the result", path) as draft:
            draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text(encoding="utf-8") == "é"
    write_whole("the result", str(path), "new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["x.json"]
    (link := tmp_path / "folder" / "link").parent.mkdir()
    link.symlink_to(path)
    write_whole("the result", link, "by its link")
    assert link.is_symlink()
    assert path.read_text() == "by its link"


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2) as reason:
        path = tmp_path / "disk" / "x.json"
        write_whole("the result", path, "old")
        with pytest.raises(RecordError, match=rf"^the result '{path}' cannot be written: {reason}$"):
            write_whole("the result", path, "x" * 20_000, RecordError)
        assert path.read_text() == "old"
        assert os.listdir(path.parent) == ["x.json"]
        write_whole("the result", path, "small")
        assert path.read_text() == "small"


def test_what_is_no_regular_file_is_written_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_whole("the result", pipe, "text")
    reader.join()
    assert read == ["text"]
    assert pipe.is_fifo()
    with pytest.raises(OutputError, match="'/dev/full' cannot be written: No space left on device"):
        write_whole("the result", "/dev/full", "text")
    with pytest.raises(OutputError, match="cannot be written: Is a directory"):
        write_whole("the result", tmp_path, "text")
    with pytest.raises(OutputError, match="cannot be written: No such file or directory"):
        write_whole("the result", tmp_path / "absent" / "x", "text")


@pytest.mark.parametrize("kills", [8])
def test_a_killed_writer_leaves_one_of_the_files_that_it_wrote(tmp_path: Path, kills: int) -> None:
    path, chance = tmp_path / "x", random.Random(0)
    program = (
        "import sys\nfrom remask.machine.disk import write_whole\n"
        "for letter in 'ab' * 10**6: write_whole('the file', sys.argv[1], letter * 300_000)\n"
    )
    for _ in range(kills):
        writer = subprocess.Popen([sys.executable, "-c", program, str(path)])
        eventually(path.exists)
        time.sleep(chance.random() * 0.02)  # so that it is killed at any moment of its work
        writer.kill()
        assert writer.wait() == -signal.SIGKILL
        assert path.read_text() in ("a" * 300_000, "b" * 300_000)
        path.unlink()


def test_a_line_that_does_not_fit_leaves_the_lines_before_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as reason:
        path = tmp_path / "disk" / "x.jsonl"
        with LineFile(str(path)) as lines:
            for _ in range(3):
                lines.write("x" * 999)
            with pytest.raises(OutputError, match=rf"x\.jsonl' cannot be written: {reason}; it holds the 3 lines"):
                lines.write("y" * 2000)
            assert path.read_text() == ("x" * 999 + "\n") * 3
            lines.write("z")
        assert path.read_text() == ("x" * 999 + "\n") * 3 + "z\n"


def test_a_file_of_lines_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot open '.*absent/x': No such file"):
        LineFile(str(tmp_path / "absent" / "x"))
