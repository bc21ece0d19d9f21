"""Load is sent by httpx, which an extra brings: without it one sentence says how to install it."""

import subprocess
import sys

import pytest

WITHOUT_HTTPX = "import sys; sys.modules['httpx'] = None\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "code",
    [
        "from remask.cli import main; sys.exit(main(['bench', 'serve', '--base-url', 'http://127.0.0.1:1']))",
        "import remask_lab.speed.routing",
    ],
)
def test_a_missing_extra_is_named(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_HTTPX + code], capture_output=True, text=True)
    assert done.returncode != 0
    said = done.stderr.splitlines()[-1]
    assert "the package 'httpx' is not installed; install it with: pip install " in said
    assert "'httpx>=" in said
