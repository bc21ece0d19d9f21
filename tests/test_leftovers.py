"""The plugin that finds what a session leaves behind, in runs of pytest over small files."""

import os
import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

HEAD = """
    import gc, os, pathlib, socket, subprocess, sys, tempfile, weakref

    KEPT = []
    DETACHED = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
"""
LEAVE = {
    "folder": (
        "tempfile.mkdtemp(prefix='mine')",
        r"temporary folder mine\w+, which holds nothing, first seen after {}",
    ),
    "file of a child": (
        "subprocess.run([sys.executable, '-c', 'import tempfile; tempfile.mkstemp(prefix=\"mine\")'], check=True)",
        r"temporary file mine\w+, first seen after {}",
    ),
    "file of the checkout": (
        "pathlib.Path(__file__).with_name('made.txt').touch()",
        r"file of the checkout made\.txt, written while .*{}.* ran",
    ),
    "port": (
        "KEPT.append(socket.create_server(('127.0.0.1', 0)))",
        r"listening socket at port \d+, first seen after test_left\.py$",
    ),
    "socket of a path": (
        "KEPT.append(socket.socket(socket.AF_UNIX)); KEPT[-1].bind('\\0remask'); KEPT[-1].listen()",
        r"listening socket at @remask, first seen after test_left\.py$",
    ),
    "process": (
        "KEPT.append(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']))",
        r"process (\d+) \(.*sleep\(600\)\), first seen after {}",
    ),
    "process without a parent": (
        "words = [sys.executable, '-c', DETACHED]\n"
        "        subprocess.run([sys.executable, '-c', f'import subprocess; subprocess.Popen({words}, "
        "start_new_session=True)'], check=True)",
        r"process (\d+) \(.*sleep\(600\)\)",
    ),
}


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder in which pytest runs in a process of its own with the plugin and none of this run's options."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr("tests.leftovers.GRACE_S", 0.0)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    pytester.makeconftest("import tests.leftovers\ntests.leftovers.GRACE_S = 0.0")
    return pytester


def run(inner: pytest.Pytester, *words: str) -> pytest.RunResult:
    return inner.runpytest_subprocess("-p", "tests.leftovers", "-p", "no:cacheprovider", *words)


def test_whatever_is_left_fails_the_session_and_is_named_with_its_test(inner: pytest.Pytester) -> None:
    tests = "\n".join(f"    def test_{number}():\n        {act}\n" for number, (act, _) in enumerate(LEAVE.values()))
    inner.makepyfile(test_left=f"{HEAD}\n{tests}")
    result = run(inner)
    text = result.stdout.str()
    killed = [int(pid) for pid in re.findall(r"^process (\d+)", text, re.MULTILINE)]
    for pid in killed:
        os.kill(pid, 9)
    result.assert_outcomes(passed=len(LEAVE))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    _, _, told = text.partition("left behind, which fails the session")
    for number, (what, (_, line)) in enumerate(LEAVE.items()):
        assert re.search(line.format(rf"test_left\.py::test_{number}"), told, re.MULTILINE), (what, text)
    assert len(killed) == 2


@pytest.mark.thorough
def test_each_thing_alone_fails_the_session(inner: pytest.Pytester) -> None:
    """A folder, by a worker and without; the controller tells what its workers found, and what none of them did."""
    inner.makepyfile(test_left=f"{HEAD}\n    def test_one():\n        tempfile.mkdtemp(prefix='mine')\n")
    for words in ([], ["-n", "1"]):
        result = run(inner, *words)
        result.assert_outcomes(passed=1)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.re_match_lines([r"temporary folder mine\w+, .* first seen after test_left\.py::test_one"])


def test_what_goes_before_the_end_is_no_leftover(inner: pytest.Pytester, tmp_path: Path) -> None:
    inner.makepyfile(
        test_none=f"""{HEAD}
    import pytest
    from tests.leftovers import lasting_folder

    SHARED = lasting_folder()

    @pytest.fixture(scope="session")
    def server():
        with socket.create_server(("127.0.0.1", 0)) as listener, subprocess.Popen(["sleep", "600"]) as process:
            yield listener
            process.kill()

    def test_a_driver():
        KEPT.append(socket.socket(socket.AF_UNIX))
        KEPT[-1].bind(f"\\0cuda-uvmfd-4026532295-{os.getpid()}")
        KEPT[-1].listen()

    def test_frozen_garbage():
        class Owner:
            pass

        owner = Owner()
        owner.itself = owner
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        weakref.finalize(owner, lambda: process.communicate())
        del owner
        gc.freeze()

    def test_fixtures(server, tmp_path):
        (tmp_path / "x").touch()
        (SHARED / "x").touch()
        (pathlib.Path(os.environ["TRITON_CACHE_DIR"]) / "x").touch()
        with tempfile.TemporaryDirectory() as folder:
            print(pathlib.Path(folder).parent)
"""
    )
    result = run(inner, "-s")
    result.assert_outcomes(passed=3)
    assert result.ret == pytest.ExitCode.OK
    assert "left behind" not in result.stdout.str()
    (folder,) = re.findall(r"(/\S+/remask-\w+)$", result.stdout.str(), re.MULTILINE)
    assert not Path(folder).exists()


def test_others_leave_what_they_like(inner: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the machine's temporary folder, and not in the session's, is none of its business."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    inner.makepyfile(f"def test_other():\n    open({str(tmp_path / 'of-another')!r}, 'w').close()\n")
    result = run(inner)
    assert result.ret == pytest.ExitCode.OK
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("pytest-of-")] == ["of-another"]
