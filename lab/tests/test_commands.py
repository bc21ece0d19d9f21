"""The laboratory's own commands: those that the documentation names are there, and each has a help."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from remask_lab.__main__ import COMMANDS, main
from remask_lab.speed.__main__ import MEASUREMENTS
from tests.docs.test_commands import PAGES, ROOT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_the_laboratory_runs_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "python -m remask_lab." not in text, "its modules are run by its command"
    for command, name in re.findall(r"python -m remask_lab ([a-z][\w-]*)(?: ([a-z]\w*))?", text):
        assert command in COMMANDS, command
        # The log names what was there on its day.
        assert command != "speed" or page.name == "log.md" or not name or name in MEASUREMENTS, name


@pytest.mark.filterwarnings("ignore:'remask_lab:RuntimeWarning")  # other tests have imported what it runs
@pytest.mark.parametrize("command", COMMANDS)
def test_each_of_its_commands_has_a_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["remask_lab", command, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage:")


@pytest.mark.parametrize("name", ["gpu-bounds", "paper-shapes", "speed host"])
def test_a_command_that_left_says_what_to_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["remask_lab", *name.split()])
    with pytest.raises(SystemExit, match=f"error: The command '{name}' left after .*: use that version"):
        main()


def test_the_benchmarks_page_lists_every_speed_command() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for name in MEASUREMENTS:
        assert f"`python -m remask_lab speed {name}`" in text


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where PyTorch brings GNU's OpenMP")
def test_threads_of_its_commands_wait_passively() -> None:
    """OpenMP itself says what it has understood, on stderr when PyTorch loads it."""
    code = "import sys\nfrom remask_lab.__main__ import main\nsys.argv = ['x', 'pages', '--help']\n"
    code += "try:\n    main()\nexcept SystemExit:\n    import torch"
    env = {**os.environ, "OMP_DISPLAY_ENV": "true"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr, done.stderr[-2000:]
