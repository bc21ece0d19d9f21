"""Generated code: what passes, what cannot be made to pass, and what the code may not do."""

import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from remask_lab.harness import execute
from remask_lab.harness.execute import SandboxError, offered
from remask_lab.harness.formats import FORMATS
from remask_lab.harness.sandbox import confinement as confinements
from remask_lab.harness.sandbox.confinement import Confinement, Limits, choices, make_cgroup, visible_paths
from remask_lab.harness.sandbox.values import decode, encode
from remask_lab.harness.score import code_of, score
from remask_lab.records.jsonl import Line
from tests.waiting import LONGEST_S, eventually


def run_tests(code: str, tests: str, before: str = "", limits: Limits | None = None, **settings: Any) -> str | None:
    """`execute.run_tests` with time for slow machines, where a test says nothing else."""
    return execute.run_tests(code, tests, before, limits=limits or Limits(seconds=LONGEST_S), **settings)


@cache
def without_namespaces() -> Confinement:
    """The strictest confinement that works here and sets limits alone."""
    probe = "import subprocess, sys\ndef f(): return subprocess.call([sys.executable, '-c', ''])"
    found = (each for each in choices() if each.mode == "process")
    return next(each for each in found if run_tests(probe, "assert f() == 0", confinement=each) is None)


@pytest.fixture(params=["offered", "process"])
def confined(request: pytest.FixtureRequest) -> Confinement:
    """The strictest confinement of this machine, and the weakest one of all."""
    return offered() if request.param == "offered" else without_namespaces()


def test_a_confinement_that_hides_the_standard_library_does_not_work() -> None:
    """As where the interpreter is a copy in a folder that all may read, and its library is in one that is private."""
    hidden = run_tests(f"{execute._PROBE}\nsys.path.clear()", "assert probe() == b'1'")
    assert hidden is not None
    assert "colorsys" in hidden


def running(marker: str) -> list[int]:
    """Processes with an argument `marker`, in every namespace."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def marker() -> str:
    """A number of seconds to sleep for that no other process has."""
    return f"{600 + secrets.randbelow(300)}.{secrets.randbelow(10**9):09d}"


@pytest.mark.few(7)
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
        ("import os\nos.abort()", "pass", "it ended early, by signal 6"),
        ("print('x' * 10 ** 7)\nimport sys\nprint('y', file=sys.stderr)", "pass", None),
        ("assert __name__ != '__main__'", "pass", None),
        ("x = bytearray(3 * 2 ** 30)", "pass", "MemoryError"),
        ("import sys\nassert sys.stdin.read() == ''", "pass", None),
        ("import os\nassert not os.environ.get('HOME')", "pass", None),
        ("open('big', 'wb').write(bytes(2 ** 26))", "pass", "OSError: [Errno 27] File too large"),
        ("def f(): return 'x' * 2 ** 25", "f()", "it returned more than 16777216 bytes"),
        ("def f():\n    while True: yield 1", "f()", "ValueError: an iterator has more than"),
        ("def f():\n    y = []\n    for _ in range(10 ** 5): y = [y]\n    return y", "f()", "RecursionError"),
    ],
)
def test_outcomes(confined: Confinement, code: str, tests: str, failure: str | None) -> None:
    found = run_tests(code, tests, confinement=confined)
    assert (found is None) == (failure is None), found
    assert failure is None or (found is not None and found.startswith(failure)), found


FORGERIES = {
    "frames": """
import gc, sys
def f(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [*frame.f_code.co_consts, *frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    seen += [item for held in gc.get_objects() if isinstance(held, (list, tuple)) for item in held]
    return next((each for each in seen if type(each) is int and 71234000 < each < 71235000), 0)
""",
    "exit": "import os\ndef f(x): os._exit(0)",
    "exit by system call": "import ctypes\ndef f(x): ctypes.CDLL(None)._exit(0)",
    "SystemExit": "def f(x): raise SystemExit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise KeyboardInterrupt",
    "StopIteration": "def f(x): raise StopIteration",
    "equal to everything": """
class Any:
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
    __index__ = lambda self: 3
def f(x): return Any()
""",
    "a number equal to everything": """
class Any(int):
    __eq__ = lambda self, other: True
    __hash__ = lambda self: 0
def f(x): return Any(3)
""",
    "built-in names": """
import builtins, json, sys, unittest
class Never(Exception): ...
builtins.AssertionError = Never
builtins.all = builtins.any = builtins.isinstance = lambda *_: True
unittest.TestCase.assertEqual = lambda *_: None
sys.excepthook = lambda *_: None
json.dumps = lambda *_, **__: '{"value": null}'
all = set = sorted = tuple = lambda *_: True
def f(x): return 3
""",
    "every descriptor": """
import os
for number in range(128):
    try:
        os.write(number, b'{"value": null}\\n' * 99)
    except OSError:
        pass
def f(x): return 3
""",
    "another set of references": """
import os
for number in range(3, 128):
    try:
        os.write(number, b'{"value": {"reference": 0}, "given": [[71234567], {}]}\\n' * 99)
    except OSError:
        pass
def f(x): return 3
""",
    "the process above": """
import os, signal
for number in (os.getppid(), 1 if os.getpid() < 10 else os.getppid()):
    try:
        os.kill(number, signal.SIGKILL)
    except OSError:
        pass
def f(x): return 3
""",
    "other processes' descriptors": """
import os
for entry in os.listdir('/proc') if os.path.isdir('/proc') else ():
    try:
        if entry.isdigit() and b'sandbox.judge' in open(f'/proc/{entry}/cmdline', 'rb').read():
            for name in os.listdir(f'/proc/{entry}/fd'):
                open(f'/proc/{entry}/fd/{name}', 'wb').write(b'x')
    except OSError:
        pass
def f(x): return 3
""",
}


@pytest.mark.few(13)
@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES)
@pytest.mark.parametrize(
    "tests", ["assert f(1) == 71234567", "assert all(map(lambda x: f(x) == 71234567, [1]))\nassert set([f(1)]) == {1}"]
)
def test_a_pass_cannot_be_forged(confined: Confinement, code: str, tests: str) -> None:
    assert run_tests(code, tests, confinement=confined, limits=Limits(seconds=5)) is not None


def test_an_iteration_over_calls_is_not_cut_short() -> None:
    code = "def f(x): raise StopIteration"
    assert run_tests(code, "assert all(map(f, [1, 2]))") == "StopIteration:"


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def f(x):\n    x.append(3)\n    x[0].add(2)", "given = [{1}]\nf(given)\nassert given == [{1, 2}, 3]"),
        ("def f(*, x): x['a'] = 1", "given = {}\nf(x=given)\nassert given == {'a': 1}"),
        ("def f(x):\n    raise ValueError('no')", "try: f(1)\nexcept ValueError as e: assert str(e) == 'no'"),
        ("class Own(KeyError): ...\ndef f(x):\n    raise Own", "try: f(1)\nexcept KeyError: pass\nelse: assert False"),
        ("def f(x):\n    yield from range(x)", "found = f(2)\nassert found != [0, 1]\nassert list(found) == [0, 1]"),
        ("def sum(x, y): return x * y", "assert sum(3, 4) == 12"),
        ("LIMIT = (1, 2)", "assert LIMIT == (1, 2) and isinstance(LIMIT, tuple)"),
        ("class Pair:\n    def __init__(self, a): self.a = a\ndef f(pairs): return [p.a for p in pairs]",
         "pairs = [Pair(1), Pair(2)]\npairs[1].a = 5\nassert f(pairs) == [1, 5] and pairs[0].a == 1"),
        ("def f(x): return x ** 20000", "assert f(10) == 10 ** 20000"),
    ],
)  # fmt: skip
def test_what_crosses_between_tests_and_code(code: str, tests: str) -> None:
    assert run_tests(code, tests) is None


def test_what_does_not_cross() -> None:
    assert "hands over a function" in str(run_tests("def f(g): return g(1)", "f(lambda x: x)"))
    assert run_tests("class A: ...\ndef f(): return A()", "assert isinstance(f(), A)") is not None


def test_helpers_of_the_problem_are_not_the_solutions() -> None:
    """The code may redefine a function that the tests use; they use the problem's."""
    record = {
        "prompt": "def square(x):\n    return x * x\n\n\ndef root(x):\n    '''Its square is x.'''\n",
        "entry_point": "root",
        "test": "def check(candidate):\n    assert square(candidate(9)) == 9",
    }
    doc = FORMATS["humaneval"].read(Line("x", record, {}))
    for body, passes in (
        ("def root(x):\n    return x ** .5", 1),
        ("def square(x): return 9\ndef root(x): return 0", 0),
    ):
        found = score("code", f"```python\n{body}\n```", doc.right, doc.before, doc.entry)
        assert found.metrics == {"pass_at_1": passes}, found


def test_setup_may_use_what_the_solution_defines() -> None:
    record = {
        "text": "Sum a list of nodes.",
        "test_list": ["assert total(root) == 3"],
        "test_setup_code": "root = Node(1)\nroot.next = Node(2)",
    }
    doc = FORMATS["mbpp"].read(Line("x", record, {}))
    code = """
class Node:
    def __init__(self, value):
        self.value, self.next = value, None
def total(node):
    return node.value + total(node.next) if node else 0
"""
    assert score("code", f"```python\n{code}```", doc.right, doc.before, doc.entry).failure is None


@pytest.mark.thorough
def test_time_is_limited_by_the_clock(confined: Confinement) -> None:
    for code, seconds in (("while True: pass", 1.0), ("import time\ntime.sleep(60)", 0.5)):
        found = run_tests(code, "", limits=Limits(seconds=seconds), confinement=confined)
        assert found == f"it ran longer than {seconds:g} seconds"
    assert run_tests("def f(): return 1", "while True: f()", limits=Limits(seconds=1)) is not None


DETACHED = """
import os
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(writer, str(os.getpid()).encode())
        os.execvp("sleep", ["sleep", "{marker}"])
    os._exit(0)
number = int(os.read(reader, 20))
def alive():
    os.kill(number, 0)
    return True
"""


@pytest.mark.thorough
def test_a_process_in_a_session_of_its_own_ends_too(confined: Confinement) -> None:
    for wait, seconds in (("pass", LONGEST_S), ("while True: pass", 2)):
        mark = marker()
        code = DETACHED.format(marker=mark)
        found = run_tests(code, f"assert alive()\n{wait}", limits=Limits(seconds=seconds), confinement=confined)
        assert found == (None if wait == "pass" else "it ran longer than 2 seconds")
        assert running(mark) == []


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """An empty folder that every user can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        assert list(folder.iterdir()) == []


def test_all_of_it_ends_with_the_evaluation(confined: Confinement, open_folder: Path) -> None:
    mark, folder = marker(), open_folder
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "TMPDIR": str(folder)}
    program = (
        "from remask_lab.harness.execute import run_tests, Limits\n"
        "from remask_lab.harness.sandbox.confinement import Confinement\n"
        f"run_tests({DETACHED.format(marker=mark)!r}, 'while True: pass', limits=Limits(seconds=1000), "
        f"confinement=Confinement({confined.mode!r}, {confined.own_user}))"
    )
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as own:
        eventually(lambda: running(mark) or own.poll() is not None)
        assert own.poll() is None
        own.send_signal(signal.SIGKILL)
    eventually(lambda: not running(mark) and not any(folder.iterdir()))


def test_the_number_of_processes_is_limited(confined: Confinement) -> None:
    mark = marker()
    code = f"""
import subprocess, time
started = [subprocess.Popen(["sleep", "{mark}"]) for _ in range(40)]
time.sleep({LONGEST_S})
"""
    found = run_tests(code, "", limits=Limits(seconds=LONGEST_S, processes=8), confinement=confined)
    assert found in ("it started more than 8 processes", "BlockingIOError: [Errno 11] Resource temporarily unavailable")
    assert running(mark) == []


def test_memory_is_limited_over_all_processes(confined: Confinement) -> None:
    code = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        held = b"x" * (60 * 2 ** 20)
        time.sleep(600)
        os._exit(0)
time.sleep(600)
"""
    found = run_tests(code, "", limits=Limits(seconds=15, megabytes=200), confinement=confined)
    by_kernel = ("it ran longer than 15 seconds", "it ended early, by signal 9")  # it may end the largest one alone
    assert found == "its processes took more than 200 MiB of memory together" or (
        confined.cgroups and found in by_kernel
    )


def test_the_temporary_folder_is_deleted(
    confined: Confinement, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in it, and without following links out of it."""
    folder = open_folder
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    outside = folder / "outside"
    outside.touch(mode=0o600)
    code = f"""
import os
open("here", "w").write("x")
assert os.listdir() == ["here"]
os.symlink({str(outside)!r}, "link")
os.mkdir("closed")
os.mkdir("closed/inner")
os.chmod("closed", 0)
for _ in range(1200):
    os.mkdir("d")
    os.chdir("d")
"""
    assert run_tests(code, "", confinement=confined) is None
    assert list(folder.iterdir()) == [outside]
    assert outside.stat().st_mode & 0o777 == 0o600
    outside.unlink()


def test_the_users_files_are_out_of_reach_where_namespaces_exist(confined: Confinement, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    found = run_tests(f"def f(): return open({str(secret)!r}).read()", "assert f() == 'x'", confinement=confined)
    if confined.mode == "process" and not confined.own_user:
        assert found is None
        assert any("read and write files with the rights of your user" in gap for gap in confined.gaps())
    else:
        assert found is not None
        assert found.startswith(("FileNotFoundError", "PermissionError"))
    home = f"import os\ndef f(): return os.listdir({str(Path.home())!r})"
    shown = {Path(path) for path, _ in visible_paths()}
    allowed = {each.relative_to(Path.home()).parts[0] for each in shown if each.is_relative_to(Path.home())}
    if confined.mode != "process":
        found = run_tests(home, f"assert set(f()) <= {allowed!r}", confinement=confined)
        assert found is None or found.startswith("FileNotFoundError")
    writes = f"open({str(Path(sys.prefix) / 'written')!r}, 'w')"
    if confined.mode != "process":
        assert str(run_tests(writes, "", confinement=confined)).startswith("OSError: [Errno 30] Read-only file system")


def test_the_network_is_out_of_reach_where_namespaces_exist(confined: Confinement) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
        found = run_tests(code, "", confinement=confined)
    if confined.mode == "process":
        assert found is None
        assert "It can reach the network." in confined.gaps()
    else:
        assert found is not None
        assert found.startswith(("OSError: [Errno 101]", "ConnectionRefusedError"))
        assert "It can reach the network." not in confined.gaps()


def test_what_is_not_confined_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    offered.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert offered() is offered()
    (message,) = [record.getMessage() for record in caplog.records if record.name == execute.__name__]
    assert message == offered().describe()
    assert "Not confined: " in message
    assert "shares the kernel" in message
    assert ("sum of its processes" in message) == (offered().cgroups is None)


def test_bubblewrap_comes_first_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/bwrap")
    assert choices()[0].mode == "bubblewrap"
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert choices()[0].mode == "namespaces"
    assert choices()[-1] == Confinement("process")


def test_nothing_runs_where_the_confinement_cannot_be_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(confinements, "visible_paths", lambda: [(str(tmp_path / "missing"), None)])
    mark = tmp_path / "mark"
    with pytest.raises(SandboxError, match=r"could not be run safely \(namespaces\)"):
        run_tests(f"open({str(mark)!r}, 'w')", "", confinement=Confinement("namespaces"))
    assert not mark.exists()
    monkeypatch.setattr(execute, "choices", lambda: [Confinement("namespaces")])
    offered.cache_clear()
    with pytest.raises(SandboxError, match="No way to run generated code"):
        offered()
    offered.cache_clear()


def test_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_cgroup(tmp_path, Limits()) is None, "a folder without the limits is none"
    assert list(tmp_path.iterdir()) == []
    assert make_cgroup(tmp_path / "missing", Limits()) is None
    mkdir = Path.mkdir

    def filled(self: Path, *args: Any, **kwargs: Any) -> None:
        mkdir(self, *args, **kwargs)
        for name in ("memory.max", "memory.swap.max", "pids.max"):
            (self / name).touch()

    monkeypatch.setattr(Path, "mkdir", filled)
    made = make_cgroup(tmp_path, Limits(megabytes=3, processes=5))
    assert made is not None
    written = {file.name: int(file.read_text()) for file in made.iterdir()}
    assert written["memory.max"] == 3 * 2**20
    assert written["memory.swap.max"] == 0
    assert 5 <= written["pids.max"] < 10


@pytest.mark.parametrize(
    "value",
    [
        None, True, -3, 2**70, -(2**20000), 0.1, float("inf"), -0.0, 1 + 2j, "a\n\ud800", b"\0\xff", bytearray(b"x"),
        [1, [2.0, "3"]], (1, (2,), []), {1: {"a": (1,)}, (1, 2): None}, {1, "a"}, frozenset({(1,)}), deque([1]),
        range(1, 9, 2), Fraction(1, 3), Decimal("1.50"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_cross_with_their_types(value: Any) -> None:
    def never(_: object) -> int:
        raise AssertionError

    found = decode(json.loads(json.dumps(encode(value, never))), never)
    assert type(found) is type(value)
    assert repr(found) == repr(value) if not isinstance(value, int) else found == value


def test_subclasses_cross_as_plain_values() -> None:
    class Loud(str):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    for value, plain in ((Counter("aab"), {"a": 2, "b": 1}), (Loud("x"), "x")):
        found = decode(encode(value, id), id)
        assert type(found) is type(plain)
        assert found == plain


@pytest.mark.parametrize(
    "data",
    [
        {"eval": "1"},
        {},
        {"int": "1", "tuple": []},
        {"int": 1},
        {"dict": [1]},
        {"dict": [[], 1]},
        {"tuple": 3},
        {"reference": "0"},
        {"range": ["a"]},
    ],
)
def test_what_is_no_value_is_refused(data: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode(data, lambda number: number)


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
