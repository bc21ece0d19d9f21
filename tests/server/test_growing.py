"""Growing canvases over HTTP: one-shot, streamed and drawn, and where they are refused."""

from typing import Any

import pytest

from tests.server.serving import CHATS, Running

GROWING = {"growing_canvas": True, "block_length": 2, "steps_per_block": 2, "ignore_eos": True}


def test_a_stream_and_its_drafts_come_to_the_one_shot_answer(server: Running) -> None:
    body = {"messages": CHATS[0], "max_tokens": 6, **GROWING}
    answer = server.chat(body).json()
    assert answer["usage"]["completion_tokens"] == 6
    chunks = server.stream({**body, "stream_drafts": True})
    text = "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each["choices"])
    assert text == answer["choices"][0]["message"]["content"]
    drawn = [each["remask"] for each in chunks if "canvas" in each.get("remask", {})]
    assert [draft["step"] for draft in drawn] == list(range(6))
    for draft in drawn:  # nothing is predicted beyond the block
        known = [place for place, token in enumerate(draft["canvas"]) if token["token_id"] is not None]
        assert max(known) == draft["step"] // 2 * 2 + 1


@pytest.mark.parametrize(
    "parts",
    [{"canvas": [{"mask": 2}, {"text": " arch"}]}, {"suffix": " arch", "max_tokens": 5}],
    ids=["canvas", "suffix"],
)
def test_beside_parts_of_a_canvas_it_is_refused(server: Running, parts: dict[str, Any]) -> None:
    found = server.client.post("/v1/completions", json={"prompt": "from abbey", **GROWING, **parts})
    assert found.status_code == 400
    assert "growing_canvas: a canvas that grows has nothing behind what is decoded" in found.json()["error"]["message"]
