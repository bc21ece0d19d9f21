"""What commands say beside their results: the banner, the log as text and as JSON, and silence."""

import json
import logging
import re
import signal
import subprocess
import warnings
from pathlib import Path
from typing import Any

import httpx
import pytest

from remask.cli import main
from remask.cli.commands import Command
from remask.cli.logs import StderrLog, print_error
from remask.cli.options import size_text
from remask.machine.log_format import FIELDS
from remask.model.ranks import Shard
from remask.parallel import lead
from tests.cli.test_serve import served
from tests.waiting import LONGEST_S, eventually

ASK = ["generate", "--model", "bundled-transit", "--dtype", "float32", "--device", "cpu", "--prompt", "where ?"]
STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|ERROR) ")
KEYS = {"time", "level", "logger", "process", "message"}


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Depths that other tests have earned add a line to the log."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines of stderr without progress bars."""
    return [line for line in capsys.readouterr().err.split("\n") if line and "\r" not in line]


def objects(text: str) -> list[dict[str, Any]]:
    """Lines of a log in JSON, each with all keys."""
    found = [json.loads(line) for line in text.splitlines()]
    assert all(set(each) >= KEYS for each in found)
    return found


def test_the_banner_has_three_lines_and_the_choices_are_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ASK) == 0
    opening, what, where, then, took = said(capsys)
    assert opening == "remask generate: loading PyTorch and the model, some seconds", "within the first second"
    model = r"bundled-transit \(llada, [\d.]+ [kM] parameters\) on cpu \(\d+ threads?\)"
    assert re.fullmatch(f"remask generate: {model}, float32, cache bicache", what)
    assert where == "  the answers go to standard output, or into the file of --output"
    assert then.startswith("  next: remask chat --model bundled-transit talks to it; remask serve bundled-transit ")
    assert main([*ASK, "--log-level", "info"]) == 0
    assert re.fullmatch(r"remask generate: \d+ tokens in \d+ passes, [\d.]+ tokens/s(, .*)?", took)
    _, logged, *banner, _ = said(capsys)
    assert STAMP.match(logged)
    assert "INFO remask: model=bundled-transit family=llada" in logged
    assert banner == [what, where, then]


def test_quiet_silences_banner_bars_and_what_is_not_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--quiet", *ASK], [*ASK, "--quiet"]):
        assert main(words) == 0
        assert capsys.readouterr().err == ""


def test_in_json_nothing_else_is_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASK, "--log-format", "json", "--log-level", "info"]) == 0
    told = objects(capsys.readouterr().err)
    assert told[0]["message"].startswith("remask: model=bundled-transit")
    assert (told[0]["level"], told[0]["logger"]) == ("INFO", "remask.llm")
    assert main([*ASK, "--log-format", "json", "--cache", "bicahe"]) == 2
    (error,) = objects(capsys.readouterr().err)
    assert error["level"] == "ERROR"
    assert "Did you mean 'bicache'" in error["message"]
    # What fails before words are parsed, too.
    assert main(["--log-format=json", "models", "pul"]) == 2
    assert "Did you mean 'models pull'" in objects(capsys.readouterr().err)[0]["message"]


def test_lines_of_json_have_tracebacks_fields_and_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("uvicorn.error")
    with monkeypatch.context() as patched:
        # pytest's own handlers would put half a surrogate into the report, which no process can send to another.
        patched.setattr(logging.getLogger(), "handlers", [])
        with StderrLog() as stderr:
            stderr.configure("info", "json")
            try:
                raise ValueError("two\nlines")
            except ValueError:
                log.error("it \ud800 broke", exc_info=True)
            log.info("seen", extra={FIELDS: {"status": 200}})
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn("of Python", stacklevel=1)
            print_error("bye")
    broke, seen, warned, last = objects(capsys.readouterr().err)
    assert (broke["message"], broke["logger"]) == ("it \ud800 broke", "uvicorn.error")
    assert broke["exception"].endswith("ValueError: two\nlines")
    assert seen[FIELDS] == {"status": 200}
    assert (warned["logger"], warned["level"]) == ("py.warnings", "WARNING")
    assert last["message"] == "bye"
    log.error("afterwards nobody listens")
    assert "afterwards" not in capsys.readouterr().err


def test_a_defect_is_a_line_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(self: Command, args: object) -> int:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Command, "run", run)
    assert main([*ASK, "--log-format", "json"]) == 1
    (line,) = objects(capsys.readouterr().err)
    assert (line["level"], line["message"]) == ("CRITICAL", "remask generate failed")
    assert line["exception"].endswith("RuntimeError: a defect")
    with pytest.raises(RuntimeError, match="a defect"):
        main(ASK)


def test_levels_are_those_of_this_project_and_the_rest_stays_readable(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("", "remask", "remask_lab", "httpx")
    before = [logging.getLogger(name).level for name in names]
    assert before[1] == logging.NOTSET, "no command has left its level"
    with StderrLog() as stderr:
        stderr.configure("debug", "text")
        for name in ("remask.engine", "remask_lab.bench", "matplotlib.font_manager", "httpx"):
            logging.getLogger(name).debug("debug of %s", name)
            logging.getLogger(name).info("info of %s", name)
    told = [line.split(" ", 2)[2] for line in said(capsys)]
    assert told == [
        "DEBUG debug of remask.engine",
        "INFO info of remask.engine",
        "DEBUG debug of remask_lab.bench",
        "INFO info of remask_lab.bench",
        "INFO info of matplotlib.font_manager",
    ]
    assert [logging.getLogger(name).level for name in names] == before


@pytest.mark.parametrize(("number", "text"), [(12, "12"), (988_672, "989 k"), (8_015_581_184, "8.02 B")])
def test_sizes_are_short(number: int, text: str) -> None:
    assert size_text(number) == text


@pytest.mark.thorough
def test_a_server_tells_its_addresses_after_its_log_line() -> None:
    with served("bundled-transit") as process:
        base = process.base
        assert httpx.get(f"{base}/health", timeout=LONGEST_S).status_code == 200
    loading, *lines = [line.rstrip("\n") for line in process.lines]
    assert loading == "remask serve: loading PyTorch and the model, some seconds"
    at = next(index for index, line in enumerate(lines) if line.startswith("remask serve: bundled-transit ("))
    assert lines[at].endswith(", float32, cache bicache")
    assert lines[at + 1] == f"  API {base}/v1, playground {base}/ (Ctrl-C stops the server)"
    assert lines[at + 2] == f"  next: remask chat --base-url {base}/v1, or open the playground in a browser"
    rest = lines[:at] + lines[at + 3 :]
    assert all(STAMP.match(line) for line in rest), "lines of uvicorn, too"
    (logged,) = lines[:at]
    assert "INFO remask: model=bundled-transit" in logged
    assert len(logged) < 800


@pytest.mark.thorough
def test_a_server_logs_json_alone() -> None:
    with served("bundled-transit", "--log-format", "json", "--log-level", "debug") as process:
        httpx.get(f"{process.base}/health", timeout=LONGEST_S)
        eventually(lambda: any('"/health"' in line or "/health" in line for line in process.lines))
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(LONGEST_S) == 0
    told = objects("".join(process.lines))
    assert {each["logger"].partition(".")[0] for each in told} >= {"remask", "uvicorn"}
    (announced,) = [each for each in told if each["message"].startswith("remask serve: ")]
    assert announced[FIELDS]["url"] == process.base
    assert [each[FIELDS]["status"] for each in told if each.get(FIELDS, {}).get("path") == "/health"] == [200]


@pytest.mark.thorough
def test_the_process_of_another_rank_logs_as_this_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
        for form in ("text", "json"):
            with StderrLog() as stderr:
                stderr.configure("info", form)
                lead.Worker(Shard(1, 2)).connection.close()
    for command in started:
        command[3] = "999"  # no connection is open there
    plain, as_json = (subprocess.run(command, capture_output=True, text=True).stderr for command in started)
    assert re.fullmatch(r"\S+ \S+ CRITICAL rank process \d+: ends with OSError: .*\n", plain)
    (line,) = objects(as_json)
    assert line["message"].startswith("ends with OSError: ")
