"""`--profile-dir`: a trace of as many steps as asked for, or of as many as there were."""

import json
from pathlib import Path

import pytest

from remask.errors import ConfigError
from remask.server.step_trace import WARM_UP, StepTrace
from tests.engine.support import make_engine, request


@pytest.mark.few(2)
@pytest.mark.parametrize(("asked", "recorded"), [(2, 2), (100, 8 - WARM_UP)])
def test_steps_are_recorded_after_the_first_few(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: int, recorded: int
) -> None:
    trace, engine = StepTrace(tmp_path / "deep" / "er", asked), make_engine()
    engine.add(request())
    with caplog.at_level("INFO"):
        while engine.busy:
            trace.before_step()
            engine.step()
            trace.after_step()
        trace.close()
        trace.close()
    events = json.loads(trace.file.read_text(encoding="utf-8"))["traceEvents"]
    assert any(event.get("name") == "aten::matmul" for event in events)
    assert [record.getMessage() for record in caplog.records if "trace of" in record.getMessage()] == [
        f"the trace of {recorded} steps is in {trace.file}"
    ]


def test_a_server_that_never_worked_writes_none(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path, 3)
    trace.close()
    assert not trace.file.exists()


def test_bad_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="profile_steps"):
        StepTrace(tmp_path, 0)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="--profile-dir"):
        StepTrace(file / "under", 1)
