"""The core stays small enough to be read: what a steady step enters is bounded."""

from tests.engine.entered import entered, report, steady_step

MOST_FILES, MOST_FUNCTIONS = 24, 115


def test_a_steady_step_enters_few_files_and_functions() -> None:
    step = steady_step()
    with entered() as calls:
        for _ in range(6):
            step()
    files = {code.co_filename for code in calls}
    assert len(files) <= MOST_FILES, report(calls)
    assert len(calls) <= MOST_FUNCTIONS, report(calls)
    assert any(code.co_qualname == "Transformer.forward" for code in calls), "a pass was run"
