"""What a plain chat request enters stays little enough to be followed."""

import pytest

from tests.engine.entered import report
from tests.server.entered import plain_request

MOST_FILES = 80


@pytest.mark.thorough
def test_a_plain_chat_request_enters_few_files() -> None:
    calls = plain_request()
    assert len({code.co_filename for code in calls}) <= MOST_FILES, report(calls)
    entered = {code.co_qualname for code in calls}
    assert {"Gate.__call__", "Intake.chat", "Transformer.forward", "ChatChoices._whole_choice"} <= entered, (
        "it was followed"
    )
