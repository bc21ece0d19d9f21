"""Decisions, scores and rankings over HTTP."""

import json
import re
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from remask.errors import ConfigError
from remask.request.questions import MAX_QUESTIONS, Decisions
from remask.server.protocol.reads import DecisionsBody
from remask.server.routes.decisions import _plans
from tests.server.serving import CHATS, Running, at_once, held, left_alone, make_llm, serving
from tests.waiting import Clock

URL = "/v1/decisions"
STATE = CHATS[0][0]["content"]
STOPS = [row.split(" > ")[0] for row in STATE.partition("table : ")[2].split(" ; ")][:20]


def question(number: int = 0, **fields: Any) -> dict[str, Any]:
    start = STOPS[number % len(STOPS)]
    asked = {
        "instructions": f"from {start} go 1 , where am i ?",
        "template": f"{start} > {{answer}}",
        "labels": "names",
    }
    return {**asked, "criteria": STOPS, "show_options": False, **fields}


def ask(server: Running, count: int = 1, **fields: Any) -> httpx.Response:
    asked = {str(number): question(number) for number in range(count)}
    return server.client.post(URL, json={"state": STATE, "questions": asked, "end_turn": False, **fields})


def likely(answers: dict[str, Any]) -> list[list[float]]:
    return [list(each["probabilities"].values()) for each in answers.values()]


def test_the_answers_are_those_of_the_library(server: Running) -> None:
    told = ask(server, 6, user="me")
    assert told.status_code == 200, told.text
    body = told.json()
    found = make_llm().decide(STATE, {str(n): question(n) for n in range(6)}, end_turn=False)
    assert likely(body["answers"]) == [
        pytest.approx(list(each.probabilities.values()), abs=1e-4) for each in found.answers.values()
    ]
    assert [each["choice"] for each in body["answers"].values()] == [each.choice for each in found.answers.values()]
    work = body["x_remask"]
    assert (body["model"], work["together"], work["calibrated"]) == ("bundled-transit", False, False)
    assert body["usage"] == {"input_tokens": found.usage.prompt_tokens, "output_tokens": 0}
    assert work["reads"] == work["forwards"] == 6


def test_one_canvas_for_all_says_so_and_differs(server: Running) -> None:
    apart, joint = ask(server, 3).json(), ask(server, 3, together=True).json()
    assert joint["x_remask"]["together"]
    assert joint["x_remask"]["reads"] == 1
    assert likely(joint["answers"]) != likely(apart["answers"])
    calibrated = ask(server, 3, calibrate=True).json()
    assert calibrated["x_remask"]["calibrated"]
    assert calibrated["x_remask"]["reads"] == 6
    assert likely(calibrated["answers"]) != likely(apart["answers"])


def openai_body(count: int = 1, **fields: Any) -> dict[str, Any]:
    asked = [{**question(n), "name": str(n)} for n in range(count)]
    turns = [{"role": "system", "content": [{"type": "input_text", "text": STATE}]}]
    return {"input": turns, "questions": asked, "end_turn": False, "safety_identifier": "me", **fields}


def test_both_apis_tell_the_same(server: Running) -> None:
    told = server.client.post(URL, json=openai_body(3))
    assert told.status_code == 200, told.text
    answers = told.json()["answers"]
    assert [each["name"] for each in answers] == ["0", "1", "2"]
    shares = [[each["probability"] for each in answer["probabilities"]] for answer in answers]
    assert shares == [pytest.approx(one, abs=1e-4) for one in likely(ask(server, 3).json()["answers"])]
    usage = told.json()["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] > usage["input_tokens_details"]["cached_tokens"] > 0


def test_the_official_client_reads_choices_and_refusals(server: Running) -> None:
    with server.openai() as client:
        if not hasattr(client, "decisions"):
            pytest.skip("needs a client that asks for decisions: pip install 'openai>=3.26'")
        found = client.decisions.create(
            model="bundled-transit",
            input=STATE,
            questions=[
                {"type": "choice", "instructions": "is it ?", "choices": [{"value": "oak"}, {"value": "elm"}]},
                {"type": "predicate", "instructions": [{"type": "input_image", "image_url": "data:,"}], "name": "i"},
            ],
        )
    assert found.answers[0].type == "choice"
    assert found.answers[0].choice in ("oak", "elm")
    assert (found.answers[1].type, found.answers[1].name) == ("refusal", "i")


def test_prompt_cache_keys_are_partitions_of_a_salt(server: Running) -> None:
    server.client.delete("/v1/cache")
    one = {"prompt_cache_key": "a"}
    keys: list[dict[str, Any]] = [{}, one, one, {**one, "cache_salt": "s"}, {}]
    told = [server.client.post(URL, json=openai_body(**key)).json()["usage"] for key in keys]
    cached = [each["input_tokens_details"]["cached_tokens"] > 0 for each in told]
    assert cached == [False, False, True, False, True]


def test_a_long_cache_key_is_a_partition_too(server: Running) -> None:
    """A key and a salt may each be as long as a salt, and neither is an error of the other."""
    server.client.delete("/v1/cache")
    first, other = {"prompt_cache_key": "\u00e9" * 1023 + "a"}, {"prompt_cache_key": "\u00e9" * 1023 + "b"}
    keys: list[dict[str, Any]] = [first, first, other, {**first, "cache_salt": "s" * 1024}]
    told = [server.client.post(URL, json=openai_body(**key)) for key in keys]
    assert {each.status_code for each in told} == {200}, told[0].text
    cached = [each.json()["usage"]["input_tokens_details"]["cached_tokens"] > 0 for each in told]
    assert cached == [False, True, False, False]


def test_a_wave_that_never_fits_is_refused(tariff: Running) -> None:
    """Though an earlier wave of the same body did fit."""
    with serving(tariff.llm, max_client_work=2000, max_choices=2) as running:
        queries = ["a", "a", "a" * 400, "a"]
        body = {"queries": queries, "documents": ["d"] * len(queries)}
        assert "raise max_client_work" in running.refusal("/v1/score", body, 429)["message"]


def test_errors_of_a_long_canvas_name_what_was_sent(tariff: Running) -> None:
    text, asked = "a" * 3000, [{"type": "yes_no", "name": "q", "instructions": "b"}]
    for url, body, field in (
        ("/v1/decisions", {"input": text, "questions": asked}, "input"),
        ("/v1/decisions", {"state": text, "questions": {"q": {"type": "yes_no", "instructions": "b"}}}, "state"),
        ("/v1/score", {"queries": text, "documents": ["b"]}, "queries"),
        ("/v1/score", {"text_1": text, "documents": ["b"]}, "text_1"),
        ("/v1/rerank", {"query": "b", "documents": [text]}, "query"),
    ):
        error = tariff.refusal(url, body)
        assert error["param"] == field
        assert error["message"].startswith(f"{field} and the questions on it, 3")
        assert "max_tokens" not in error["message"]


def test_the_body_of_system_one(server: Running) -> None:
    """Names of that API's models are the served one's, and what is unknown is ignored, but not images."""
    asked = {
        "model": "jev-latest",
        "state": {"line": STOPS},
        "questions": {
            "a": {
                "type": "noul",
                "instructions": {"is": "it ?"},
                "criteria": {"true": ["it is"]},
                "labels": ["1", "0"],
            },
            "b": {"type": "score", "criteria": ["oak", {"label": "elm"}], "labels": ["1", "2"]},
        },
        "seed": 3,
        "x_trace": {"a": 1},
    }
    told = server.client.post("/v1/systemone", json=asked).json()
    assert (told["model"], set(told)) == ("bundled-transit", {"model", "answers", "usage", "x_remask"})
    noul, score = told["answers"].values()
    assert 0 < noul["noul"] < 1
    assert score["score"] == pytest.approx(score["probabilities"]["1"])
    assert score["legend"] == {"0": "oak", "1": {"label": "elm"}}
    refused: list[tuple[dict[str, Any], int, list[str]]] = [
        ({"assets": {"a": {}}}, 422, ["body", "assets"]),
        ({"state": None}, 422, ["body", "state"]),
        ({"questions": {"a": {"type": "box"}}}, 422, ["body", "questions"]),
    ]
    for more, status, where in refused:
        answer = server.client.post("/v1/systemone", json={**asked, **more})
        assert (answer.status_code, [each["loc"] for each in answer.json()["detail"]]) == (status, [where])
    unknown = server.client.post("/v1/systemone", json={**asked, "model": "other"})
    assert (unknown.status_code, unknown.json()["detail"]["error_type"]) == (404, "not_found_error")
    names = [each["name"] for each in server.client.get("/v1/models").json()["models"]]
    assert (names[0], names[-1]) == ("bundled-transit", "jev-latest")


def test_more_questions_than_places_are_read_in_waves_beside_others(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one = likely(ask(server, 20).json()["answers"])
    with serving(make_llm(max_num_seqs=3), max_queue=4, max_choices=5) as small:
        open_requests: list[int] = []
        submit = small.service.engine.submit

        def submits(pending: Any) -> Any:
            ticket = submit(pending)
            open_requests.append(small.open)
            return ticket

        monkeypatch.setattr(small.service.engine, "submit", submits)
        answers = [ask(small, 20)]
        chat, *others = at_once(small.ask, *[lambda: ask(small, 20)] * 2)
        answers += others
        assert max(open_requests) <= 7
        assert chat.status_code in (200, 429)
        assert {each.status_code for each in answers} <= {200, 429}
        assert sum(each.status_code == 200 for each in answers) >= 2
        for each in answers:
            if each.status_code == 200:
                assert likely(each.json()["answers"]) == [pytest.approx(one, abs=1e-4) for one in one_by_one]
        small.settle()


def test_a_client_that_leaves_ends_its_passes(server: Running) -> None:
    served = server.service.llm.engine.stats
    questions = {str(n): question(n, template=f"{n} {{answer}}") for n in range(200)}
    before = served.steps
    with held(server, steps=2) as hold:
        with server.post(URL, {"state": STATE, "questions": questions}):
            hold.wait()
        left_alone(server)
    server.settle()
    assert served.steps <= before + 3


def test_a_deadline_holds_for_all_waves() -> None:
    clock = Clock(tick=1000.0)  # it is read when the body comes, and before each wave
    with serving(make_llm(max_num_seqs=2), clock, max_choices=2, max_queue=0, step_limit=1e6) as small:
        told = ask(small, 20, deadline_s=3500)
        assert told.status_code == 504
        assert "deadline_s" in told.json()["error"]["message"]
        assert 0 < small.service.llm.engine.stats.steps < 10
        small.settle()


def test_metrics_count_every_canvas(server: Running) -> None:
    def count() -> float:
        text = server.client.get("/metrics").text
        (line,) = [
            each for each in text.splitlines() if each.startswith("remask:request_success_total") and '"stop"' in each
        ]
        return float(line.split()[-1])

    before = count()
    ask(server, 5)
    assert count() == before + 5


def test_scores_and_rankings_have_vllms_form(server: Running) -> None:
    labels = {"labels": ["1", "0"]}
    documents = ["oak > elm", "elm > oak", "ivy > jade"]
    told = server.client.post("/rerank", json={"query": "oak", "documents": documents, **labels}).json()
    scores = {each["index"]: each["relevance_score"] for each in told["results"]}
    assert [each["relevance_score"] for each in told["results"]] == sorted(scores.values(), reverse=True)
    assert all(each["document"]["text"] == documents[each["index"]] for each in told["results"])
    assert told["usage"]["total_tokens"] == told["usage"]["prompt_tokens"] > 0
    for path in ("/v1/rerank", "/v2/rerank"):
        top = server.client.post(path, json={"query": "oak", "documents": documents, "top_n": 1, **labels}).json()
        assert [each["index"] for each in top["results"]] == [told["results"][0]["index"]]
    expected = [scores[index] for index in range(3)]
    for path, names in (("/v1/score", ("queries", "documents")), ("/score", ("text_1", "text_2"))):
        for query in ("oak", ["oak"] * 3):
            body = dict(zip(names, (query, documents), strict=True))
            data = server.client.post(path, json={**body, **labels}).json()["data"]
            assert [(each["index"], each["object"]) for each in data] == [(n, "score") for n in range(3)]
            assert [each["score"] for each in data] == pytest.approx(expected, abs=1e-4)
    asked = {"type": "yes_no", "instructions": f"Document: {documents[1]}\n\nDoes the document answer the query?"}
    found = make_llm().decide("Query: oak", {"q": {**asked, **labels}}).answers["q"]
    assert found.value == pytest.approx(scores[1], abs=1e-4)


def test_salts_and_priorities_are_those_of_the_body(server: Running) -> None:
    server.client.delete("/v1/cache")
    told = [ask(server, cache_salt=salt).json()["x_remask"] for salt in ("one", "two", "one")]
    assert [each["prefix_row_layers"] == 0 for each in told] == [False, False, True]
    assert DecisionsBody.model_validate({"questions": {"q": question()}, "priority": 3}).terms.priority == 3


def test_reads_of_all_queries_count_together(server: Running) -> None:
    asked = [Decisions("oak", {"q": question()}, calibrate=True)] * 2
    few = SimpleNamespace(llm=server.service.llm, config=SimpleNamespace(max_reads=3))
    with pytest.raises(ConfigError, match=r"^questions take more than 3 canvases"):
        _plans(few, asked)  # type: ignore[arg-type]
    few.config.max_reads = 4
    assert [len(plan.asks) for plan in _plans(few, asked)] == [2, 2]  # type: ignore[arg-type]


def many(count: int, **fields: Any) -> dict[str, Any]:
    return {"questions": {str(n): {"instructions": "x", "criteria": ["a", "b"], **fields} for n in range(count)}}


HOSTILE: list[tuple[str, dict[str, Any], str, str]] = [
    (URL, many(10_000), "questions", f"at most {MAX_QUESTIONS} questions"),
    (URL, many(8_000), "questions", "characters altogether"),
    (URL, {"state": "x" * 100_000, **many(1)}, "state", "at most"),
    (URL, many(2, labels=["yes", "no"]), "questions", "cannot tell the labels 'yes' and 'no' apart"),
    (URL, many(60, type="number", criteria=None, min=0, max=999), "questions", "characters altogether|canvases"),
    (URL, many(1, type="number", criteria=None, min=0, max=2**40), "questions", "questions.0: max must be"),
    (URL, many(1, criteria=["a"] * 5000), "questions", "at most 1000 texts"),
    (URL, many(1, labels=["a"]), "questions", "holds 1 texts for 2 alternatives"),
    (URL, many(1, criteria=["\ud800", "b"]), "questions", "criteria must be"),
    (URL, many(1, depends_on="1"), "questions", "Unknown question field 'depends_on'"),
    (URL, {"questions": {}}, "questions", "ask one at least"),
    (URL, {"questions": [1]}, "questions", "must be a list of at most 400 questions, or an object"),
    (URL, {"state": 7, **many(1)}, "state", "must be a text"),
    (URL, {"temperature": 1, **many(1)}, "temperature", "Unknown field"),
    (URL, {"deadline_s": -1, **many(1)}, "deadline_s", "must be a number"),
    (URL, {"priority": -5, **many(1)}, "priority", "not open to this request"),
    (URL, {"model": "gpt", **many(1)}, "model", "does not exist"),
    (URL, {"cache": "dkv-greedy", **many(1, labels=["1", "2"])}, "cache", ""),
    ("/rerank", {"query": "x", "documents": []}, "documents", "at least 1"),
    ("/rerank", {"query": "x", "documents": ["a"] * 9000}, "documents", "at most 8192"),
    ("/rerank", {"query": "x", "documents": ["a"], "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "too long"),
    ("/v1/score", {"queries": ["x", "y"], "documents": ["a"]}, "documents", "2 queries and 1 documents"),
    ("/v1/score", {"queries": "x"}, "documents", "two names of one thing"),
    ("/rerank", {"query": "x" * 100_000, "documents": ["a"]}, "query", "at most"),
    ("/rerank", {"query": "x", "documents": ["a" * 100] * 8000}, "documents", "characters altogether"),
    (
        "/v1/score",
        {"queries": "x", "documents": "a", "labels": ["yes", "no"]},
        "documents",
        "cannot tell the labels 'yes' and 'no' apart",
    ),
    ("/v1/score", {"queries": "x" * 100_000, "documents": ["a"]}, "queries", "at most"),
]


@pytest.mark.parametrize(("url", "body", "field", "message"), HOSTILE, ids=[f"{n}" for n in range(len(HOSTILE))])
def test_hostile_bodies_end_in_clear_errors(
    server: Running, url: str, body: dict[str, Any], field: str, message: str
) -> None:
    began = time.thread_time()
    told = server.client.post(url, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = told.json()["error"]
    assert told.status_code in (400, 404), told.text
    assert re.search(message, error["message"]), error
    assert len(error["message"]) < 700
    assert time.thread_time() - began < 5
    if field != "cache":
        assert error["param"] == field
