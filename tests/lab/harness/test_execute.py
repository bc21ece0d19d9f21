"""Generated code in a process of its own: what passes, what does not, and what it may not do."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remask_lab.harness.execute import run_tests
from remask_lab.harness.score import code_of, score


@pytest.mark.parametrize(
    ("code", "tests", "failure"),
    [
        ("def f(x):\n    return x + 1", "assert f(1) == 2", None),
        ("def f(x):\n    return x", "assert f(1) == 2, 'off by one'", "AssertionError: off by one"),
        ("def f(x:\n", "f(1)", "SyntaxError"),
        ("", "f(1)", "NameError: name 'f' is not defined"),
        ("import sys\nsys.exit(0)", "assert False", "SystemExit: 0"),
        ("import os\nos._exit(0)", "assert False", "it ended early, with status 0"),
        ("raise KeyboardInterrupt", "pass", "KeyboardInterrupt"),
        ("import os\nos.abort()", "pass", "it ended early, with status -6"),
        ("print('x' * 10 ** 6)\nimport sys\nprint('y', file=sys.stderr)", "pass", None),
        ("assert __name__ != '__main__'", "pass", None),
        ("x = bytearray(3 * 2 ** 30)", "pass", "MemoryError"),
        ("import sys\nassert sys.stdin.read() == ''", "pass", None),
        ("import os\nassert not os.environ.get('HOME')", "pass", None),
    ],
)
def test_outcomes(code: str, tests: str, failure: str | None) -> None:
    found = run_tests(code, tests)
    assert (found is None) == (failure is None)
    assert failure is None or (found is not None and found.startswith(failure))


def test_time_is_limited_by_the_clock() -> None:
    start = time.monotonic()
    assert run_tests("while True: pass", "", seconds=1.0) == "it ran longer than 1 seconds"
    assert run_tests("import time\ntime.sleep(60)", "", seconds=0.5) == "it ran longer than 0.5 seconds"
    assert time.monotonic() - start < 20


def test_what_it_starts_ends_with_it(tmp_path: Path) -> None:
    """A child that would write a file after a while does not live to do so."""
    mark = tmp_path / "mark"
    late = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {late!r}])"
    run_tests(code, "")
    time.sleep(3)
    assert not mark.exists()


def test_it_works_in_a_folder_that_is_gone_afterwards(tmp_path: Path) -> None:
    assert run_tests("open('here', 'w').write('x')", "import os; assert os.listdir() == ['here']") is None
    assert run_tests("open('big', 'wb').write(bytes(2 ** 26))", "") is not None


def test_there_is_no_network_unless_the_kernel_refuses_a_namespace() -> None:
    unshared = subprocess.run(
        [sys.executable, "-c", "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000 | 0x40000000))"],
        check=False,
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
        found = run_tests(code, "")
    if unshared.returncode != 0:
        assert found is None, "without a namespace the network stays, and the tests run all the same"
    else:
        assert found is not None
        assert found.startswith("OSError"), found


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("Sure:\n```py\nx = 1\n```\nand\n```python\ny = 2\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("x = 1", None),
        ("```bash\nls\n```", None),
    ],
)
def test_the_first_block_of_python_is_what_counts(response: str, code: str | None) -> None:
    assert code_of(response) == code


def test_a_response_without_code_runs_nothing() -> None:
    found = score("code", "def f(): return 1", "assert f() == 1")
    assert (found.metrics, found.answer) == ({"pass_at_1": 0.0}, None)
    assert found.failure == "the response has no fenced block of code"
