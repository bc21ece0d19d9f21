"""Answers of a given form, in text: each one matches, as judged by `re` and by a validator of JSON Schema."""

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import jsonschema_rs
import numpy as np
import pytest

from remask import LLM
from remask.answers import structured as structure
from remask.answers.structured_worker import CompiledPattern, compile_pattern
from remask.checkpoint.tokenizer import byte_tokenizer
from remask.errors import ConfigError
from remask.machine.helper import Helpers, LateError, RefusedError, StartError
from remask.request.forms import StructuredOutputs
from remask.text.token_bytes import token_bytes
from tests.server.serving import Running, serving
from tests.text.test_detokenize import BYTES
from tests.waiting import LONGEST_S, eventually

pytest.importorskip("outlines_core", reason="needs outlines-core: pip install outlines-core")

URL = "/v1/chat/completions"
USER = {"role": "user", "content": "which line goes from abbey to arch ?"}
ROBOT = {
    "type": "object",
    "title": "Robot",
    "properties": {"name": {"type": "string", "maxLength": 6}, "on": {"type": "boolean"}, "legs": {"type": "integer"}},
    "required": ["name", "on", "legs"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled-tariff", cache="bicache", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Running]:
    with serving(llm, model_names=["bundled-tariff"], sampling={}) as running:
        yield running


REGEXES = ("[a-z]{2,9}", "(ja|nein)( [0-9]+)?", "€[0-9]{1,3}(,[0-9]{2})?", "(?:[ab]c?)*", "[^a-z]{3}")
SAMPLERS: tuple[dict[str, Any], ...] = (
    {},
    {"block_length": 8},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_k": 3, "block_length": 16},
    {"remasking": "random", "temperature": 0.7},
    {"remasking": "entropy"},
    {"threshold": 0.2, "block_length": 16},
    {"cfg_scale": 1.0},
)
CACHES = ("none", "bicache", "block-prefix", "block-dual", "dkv-decode", "dllm-cache", "bicache+block-dual")


def matches(form: dict[str, Any], text: str) -> None:
    if "regex" in form:
        assert re.fullmatch(form["regex"], text), (form, text)
    elif "choice" in form:
        assert text in form["choice"]
    else:
        jsonschema_rs.validator_for(form["json"], validate_formats=True).validate(json.loads(text))


ODD_NAME = 'a"b\\\n\0é'
LIBRARIES: dict[str, dict[str, Any]] = {
    "names": {"properties": {ODD_NAME: {"const": 1}}, "required": [ODD_NAME]},
    "values": {"enum": [{ODD_NAME: [ODD_NAME]}, [{"\x1b": {}}]]},
    "a tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "integer", "minimum": 1, "maximum": 9}],
        "minItems": 2,
        "maxItems": 2,
    },
    "a union": {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog~1"}],
        "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog~1"}, "propertyName": "kind"},
        "$defs": {
            "Cat": {"properties": {"kind": {"const": "cat", "default": "cat"}, "lives": {"enum": [7, 9]}}},
            "Dog/": {
                "properties": {"kind": {"const": "dog"}, "good": {"allOf": [{"$ref": "#good"}]}},
                "required": ["good"],
            },
            "Good": {"$anchor": "good", "type": "boolean"},
        },
    },
    "a tree": {
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    },
    "anything": {},
    "an object": {"type": "object"},
    "a list": {"type": "array"},
    "a dictionary": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
}
LEAVES: tuple[dict[str, Any], ...] = (
    {"type": "string", "pattern": '^("|x){2}$'},
    {"type": "string", "pattern": r"^\d{2}[^a-z]$|^.\\\\\w?$"},
    {"type": "string", "format": "date"},
    {"type": "string", "minLength": 1, "maxLength": 3},
    {"type": "number", "exclusiveMinimum": -312, "maximum": 1089},
    {"type": "integer", "minimum": -7, "exclusiveMaximum": 2000},
    {"type": "array", "items": {"enum": ["é b", None, [1, "x"]]}, "minItems": 1, "maxItems": 2},
)


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(5))
def test_every_answer_has_its_form(llm: LLM, seed: int) -> None:
    """Schemas, expressions and choices under random samplers and caches, some answers together."""
    rng = random.Random(seed)
    policy = llm.session.policy(rng.choice(CACHES))
    forms: list[dict[str, Any]] = [{"json": schema} for schema in rng.sample([*LIBRARIES.values(), *LEAVES], 3)]
    forms += [{"regex": rng.choice(REGEXES)}, {"choice": rng.sample(["yes", "no", "näh?", "a+b*"], 2)}]
    requests = []
    for number, form in enumerate(forms):
        params: dict[str, Any] = {"max_tokens": 64, "steps": 32, "seed": number, **rng.choice(SAMPLERS)}
        (request,) = llm.session.requests([[USER]], params, policy=policy)
        requests.append(replace(request, id=str(number)).with_readers(llm.session.constraint(form)))
    outputs = {output.id: output for output in llm.session.run(requests)}
    for number, form in enumerate(forms):
        output = outputs[str(number)]
        assert output.error is None
        assert output.text is not None
        matches(form, output.text)


@pytest.fixture(scope="module", params=["masked", "block-causal"])
def kind(request: pytest.FixtureRequest, llm: LLM) -> LLM:
    if request.param == "masked":
        return llm
    other = LLM("sdar-tiny", load_format="dummy", dtype="float32", device="cpu")
    shape = other.loaded.config
    other.session.loaded = replace(other.loaded, tokenizer=byte_tokenizer(shape.vocab, shape.mask_id, shape.stop_ids))
    return other


@pytest.mark.few(5)
@pytest.mark.parametrize("name", LIBRARIES)
def test_schemas_as_libraries_write_them(kind: LLM, name: str) -> None:
    form = {"json": LIBRARIES[name]}
    for seed in range(2):
        own = {"max_tokens": 64, "temperature": 1.0, "seed": seed}
        (output,) = kind.generate(["go"], own, structured_outputs=form)
        assert output.error is None
        assert output.text is not None
        matches(form, output.text)
        assert output.finish_reason == "stop"


@pytest.mark.thorough
def test_over_http_in_openais_way_and_vllms(served: Running) -> None:
    formats = (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "robot", "schema": ROBOT, "strict": True}}},
        {"structured_outputs": {"json": ROBOT}},
    )
    texts = []
    for fields in formats:
        body = {"messages": [USER], "max_tokens": 48, **fields}
        told = served.client.post(URL, json=body)
        assert told.status_code == 200, told.text
        texts.append(told.json()["choices"][0]["message"]["content"])
        streamed = [chunk["choices"][0]["delta"].get("content", "") for chunk in served.stream(body)]
        assert "".join(streamed) == texts[-1]
    assert texts[0] == texts[1]
    matches({"json": ROBOT}, texts[0])
    body = {"messages": [USER], "max_tokens": 32, "response_format": {"type": "json_object"}}
    assert isinstance(json.loads(served.client.post(URL, json=body).json()["choices"][0]["message"]["content"]), dict)
    body = {"prompt": "x", "max_tokens": 8, "structured_outputs": {"choice": ["arch", "acorn"]}}
    assert served.client.post("/v1/completions", json=body).json()["choices"][0]["text"] in ("arch", "acorn")


HOSTILE = ("(a{1000}){1000}", "(a|aa)+b{0,900}(c|d{0,900}){0,900}", r"(\p{L}|\p{N}){0,5000}", "(?=a)b", "(", "x*+?{")


@pytest.mark.thorough
@pytest.mark.parametrize("regex", HOSTILE)
def test_a_hostile_expression_ends_in_an_error(served: Running, regex: str) -> None:
    begun = time.thread_time()
    body = {"messages": [USER], "max_tokens": 8, "structured_outputs": {"regex": regex}}
    told = served.client.post(URL, json=body)
    assert told.status_code == 400, told.text
    assert "structured_outputs" in told.json()["error"]["message"]
    assert time.thread_time() - begun < 1.0
    assert served.client.post(URL, json={"messages": [USER], "max_tokens": 4}).status_code == 200


def test_forms_that_take_long_to_compile_leave_a_thread_to_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilations hold every text thread but one, also those of short bodies; a form that is kept is a short one."""
    passing, begun = threading.Event(), []
    compile_form = structure.Structures._compile_source

    def held(*args: Any) -> Any:
        begun.append(args)
        assert passing.wait(LONGEST_S)
        return compile_form(*args)

    def ask(running: Running, regex: str) -> int:
        body = {"messages": [USER], "max_tokens": 4, "structured_outputs": {"regex": regex}}
        return httpx.post(f"{running.base}{URL}", json=body, timeout=LONGEST_S).status_code

    llm.session.constraint({"regex": "[a-d]{4}"})
    monkeypatch.setattr(structure.Structures, "_compile_source", held)
    with (
        serving(llm, model_names=["bundled-tariff"], sampling={}, text_workers=2) as running,
        ThreadPoolExecutor(4) as clients,
    ):
        hostile = [clients.submit(ask, running, f"[x-z]{{4}}|held{number}") for number in range(4)]
        eventually(lambda: bool(begun))
        assert running.client.post(URL, json={"messages": [USER], "max_tokens": 4}).status_code == 200
        assert ask(running, "[a-d]{4}") == 200
        assert len(begun) == 1
        passing.set()
        assert [each.result() for each in hostile] == [200] * 4


BAD_FORMS: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of regex, choice, json and json_object; got none"),
    ({"regex": "a", "choice": ["a"]}, "got regex, choice"),
    ({"choice": []}, "holds no text"),
    ({"choice": ["x" * 9000, "y" * 9000]}, "is too long"),
    ({"grammar": "x"}, "structured_outputs.grammar is not supported: "),
    ({"json": {"type": "string", "minimum": 3}}, "minimum needs the type 'integer' or 'number', got 'string'"),
    ({"json": {"type": "number", "exclusiveMinimum": 3, "maximum": 3}}, "leave no number"),
    ({"json": {"type": "number", "minimum": 0.5}}, "minimum of a 'number' is guaranteed where it is whole, got 0.5"),
    ({"json": {"type": "integer", "minimum": True}}, "minimum must be a number"),
    ({"json": {"type": "integer", "minimum": 10**30}}, "minimum has more than 18 digits"),
    ({"json": {"type": "string", "format": "iri"}}, "format 'iri' cannot be guaranteed; understood: date"),
    (
        {"json": {"type": "string", "format": "date", "maxLength": 3}},
        "format and maxLength are not guaranteed together",
    ),
    (
        {"json": {"items": {"type": "string", "pattern": "(?=a)b"}}},
        "json.items: pattern '(?=a)b' has a group that looks",
    ),
    ({"json": {"type": "string", "pattern": "a^b"}}, "has ^ within it"),
    ({"json": {"type": "string", "pattern": "(a$)"}}, "has $ within it"),
    ({"json": {"type": "string", "pattern": "a$b"}}, "has $ within it"),
    ({"json": {"type": "string", "pattern": "(a"}}, "has brackets that do not close"),
    ({"json": {"type": "string", "pattern": "a)|(b"}}, "has brackets that do not open"),
    ({"json": {"type": "string", "pattern": "a|*b"}}, "has * with nothing to repeat"),
    ({"json": {"type": "string", "pattern": r"(a)\1"}}, "has \\1"),
    ({"json": {"type": "string", "pattern": "a\nb"}}, "has the character"),
    ({"json": {"type": "string", "pattern": 3}}, "pattern must be a text"),
    ({"json": {"type": "object", "properties": [1]}}, "must be an object of schemas"),
    ({"json": {"items": 3}}, "must be an object of keywords"),
    ({"json": {"type": "string", "enum": [3]}}, "not of its own type 'string'"),
    ({"json": {"type": "object", "required": ["a"]}}, "a schema for each property, such as 'a'"),
]


@pytest.mark.parametrize(("form", "error"), BAD_FORMS)
def test_a_form_that_cannot_be_guaranteed_is_refused(form: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        StructuredOutputs.from_mapping(form)


def test_schemas_within_schemas_within_schemas() -> None:
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(40):
        deep = {"anyOf": [deep]}
    with pytest.raises(ConfigError, match="nested in more than 32"):
        StructuredOutputs(json=deep)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"response_format": {"type": "json_schema"}}, "go together"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "go together"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "send one of them"),
        (
            {"structured_outputs": {"regex": "a{30}"}, "max_tokens": 8},
            "structured_outputs: max_tokens=8 does not suit it: no answer",
        ),
        ({"structured_outputs": {"regex": "a+"}, "stop": "b", "max_tokens": 8}, "stop: a stop within an answer"),
    ],
)
def test_bodies_that_are_refused(served: Running, fields: dict[str, Any], error: str) -> None:
    told = served.client.post(URL, json={"messages": [USER], **fields})
    assert told.status_code == 400
    assert error in told.json()["error"]["message"]


ODD = {"type": "json_schema", "schema": {"type": "integer", "multipleOf": 3}}
PLAIN = {"type": "json_schema", "schema": {"type": "integer"}}


def asked_as(url: str, form: dict[str, Any]) -> dict[str, Any]:
    """A body that asks for a form in the words of an API."""
    if url == "/v1/responses":
        return {"input": "x", "text": {"format": form}}
    if url == "/v1/messages":
        return {"messages": [USER], "output_config": {"format": form}}
    schema = {"schema": form["schema"]}
    return {"messages": [USER], "response_format": {"type": form["type"], "json_schema": schema}}


@pytest.mark.parametrize(
    ("url", "name", "schema"),
    [
        (URL, "response_format", "response_format.json_schema.schema"),
        ("/v1/responses", "text", "text.format.schema"),
        ("/v1/messages", "output_config", "output_config.format.schema"),
    ],
)
def test_an_error_names_the_field_that_asks_for_a_form(
    served: Running, url: str, name: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(structure, "MAX_STATES", 1)
        large = {**PLAIN, "schema": {"const": name}}
        message = served.client.post(url, json=asked_as(url, large)).json()["error"]["message"]
    assert message.startswith(f"{name}: its automaton has")
    odd = served.client.post(url, json=asked_as(url, ODD)).json()["error"]["message"]
    assert odd.startswith(f"{schema} holds 'multipleOf'")
    twice = asked_as(url, PLAIN) | {"structured_outputs": {"regex": "a"}}
    told = served.client.post(url, json=twice).json()["error"]["message"]
    assert told.startswith(f"{name} and structured_outputs both say")


def test_a_form_is_compiled_once(llm: LLM) -> None:
    one = llm.session.constraint({"choice": ["one", "other"]})
    assert llm.session.constraint(StructuredOutputs(choice=["one", "other"])) is one
    assert llm.session.constraint(None) is None


def job(text: str, most: int = 1000) -> CompiledPattern:
    tokens = [(0, b"a"), (1, b"b"), (2, b"ab"), (3, b"1")]
    return compile_pattern(text, {"tokens": tokens, "vocab_size": 5, "max_transitions": most})


ANCHORED = [
    (r"^\d{2}$", "[0-9]{2}"), (r"\A(?:yes|no)\Z", "(?:yes|no)"), (r"(^a|^b)c\z", "(a|b)c"), ("^a|b$", "a|b"),
    (r"^(a$|\^)$", r"(a|\^)"), ("[$^]", "[$^]"), (r"(?i)^a[\d_]", "(?i)a[0-9_]"), ("a(b|(?i)c)d$", "a(b|(?i)c)d"),
]  # fmt: skip


@pytest.mark.parametrize(("regex", "plain"), ANCHORED)
def test_anchors_at_the_ends_of_an_expression_mean_the_whole_text(regex: str, plain: str) -> None:
    assert StructuredOutputs(regex=regex).source == ("regex", plain)


@pytest.mark.parametrize(
    "regex", ["a^b", "a$b", "(c$|(?i)b)d", "(^a)*b", "(a$)*", "x(^a)", r"a\Ab", r"(a\z)b", "^*a", "a|^?b"]
)
def test_an_anchor_within_an_expression_is_refused_by_name(regex: str) -> None:
    with pytest.raises(ConfigError, match="anchor"):
        StructuredOutputs(regex=regex)


@pytest.mark.parametrize("regex", ["ab?", "ab?$"])
def test_what_the_worker_answers(regex: str) -> None:
    made = job(regex)
    edges = {name: np.frombuffer(made[name], dtype=np.int64) for name in ("source", "label", "target")}
    taken = set(edges["label"][edges["source"] == made["start"]].tolist())
    assert taken == {0, 2}, "a, and ab at once; the token that ends an answer is left out"
    assert set(made["final"]) == set(edges["target"].tolist())


def test_the_worker_refuses() -> None:
    with pytest.raises(RefusedError, match="its automaton has more than 3 transitions"):
        job("[ab]{9}", most=3)
    for unbalanced in ("(", ")", "a)(b"):
        with pytest.raises(RefusedError):
            job(unbalanced)


@pytest.mark.parametrize("regex", ["a(b1)?", "a|ab1", "(ab1|a)?", r"(a|ab1)(\$|)", "[$]?a(b1)?[)]?"])
def test_a_whole_text_may_go_on(regex: str) -> None:
    """Though what stands between the two is no whole text."""
    made = job(regex)
    automaton = structure.automaton_of(
        np.stack([np.frombuffer(made[n], dtype=np.int64) for n in ("source", "label", "target")], axis=1),
        made["start"],
        np.array(made["final"], dtype=np.int64),
        5,
    )
    for tokens, whole in (([0], True), ([0, 1], False), ([0, 1, 3], True), ([2, 3], True)):
        assert automaton.accepting[automaton.state_after(tokens)] == whole


def test_the_forms_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "CACHE_SIZE", 2)
    structures = structure.Structures([b"a", b"b", b"c", None], [3])
    one, _ = (structures.compile(StructuredOutputs(regex=text)) for text in "ab")
    assert structures.compile(StructuredOutputs(regex="a")) is one
    structures.compile(StructuredOutputs(regex="c"))
    assert [text for _, text in structures._forms] == ["a", "c"]


def test_what_is_beyond_the_limits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    structures = structure.Structures([b"a", None], [1])
    monkeypatch.setattr(structure, "MAX_STATES", 3)
    with pytest.raises(ConfigError, match="states, and at most 3 are taken"):
        structures.compile(StructuredOutputs(regex="aaaaaa"))
    monkeypatch.setattr(structure, "MAX_STATES", 99)
    monkeypatch.setattr(structure, "MAX_CLASS_TRANSITIONS", 3)
    with pytest.raises(ConfigError, match="transitions, and at most 3 are taken"):
        structures.compile(StructuredOutputs(regex="aaaaa"))
    monkeypatch.setattr(structure, "MAX_SECONDS", 0.01)
    monkeypatch.setattr(structure, "WAIT", 10**5)
    with pytest.raises(ConfigError, match=r"it takes more than 0.01 s of processor time"):
        structures.compile(StructuredOutputs(regex="(aa?){2000}"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="need the package outlines-core"):
        structures.compile(StructuredOutputs(regex="aa"))


@pytest.mark.parametrize("fails", [False, True])
def test_a_form_is_compiled_once_for_all_who_ask_for_it(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, runs, release = structure.Structures._compile_source, 0, threading.Event()

    def run(self: structure.Structures, *args: Any) -> CompiledPattern:
        nonlocal runs
        runs += 1
        assert release.wait(60)
        if fails:
            raise ConfigError("it is too slow")
        return plain(self, *args)

    monkeypatch.setattr(structure.Structures, "_compile_source", run)
    structures, form = structure.Structures([b"a", None], [1]), StructuredOutputs(regex="a{3}")
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(structures.compile, form) for _ in range(8)]
        release.set()
        errors = [each.exception() for each in asked]
    if fails:
        assert {str(error) for error in errors} == {"it is too slow"}
        with pytest.raises(ConfigError, match="too slow"):
            structures.compile(form)
    else:
        assert {id(each.result()) for each in asked} == {id(structures.compile(form))}
    assert structures.is_cached(form)
    assert runs == 1


@pytest.mark.parametrize("kind", [LateError, StartError])
def test_what_failed_as_the_machine_was_busy_is_tried_again(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    structures, form = structure.Structures([b"a", None], [1]), StructuredOutputs(regex="a{3}")

    def late(*_: Any) -> None:
        raise kind("it takes more than 40 s on this machine")

    with monkeypatch.context() as patch:
        patch.setattr(Helpers, "ask", late)
        with pytest.raises(ConfigError, match="try again later"):
            structures.compile(form)
    assert structures.compile(form) is structures.compile(form)


def test_a_tokenizer_that_joins_words_is_refused() -> None:
    words = LLM("bundled-transit", dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="texts of their own, and this model's has not: its decoder is none"):
        words.session.constraint({"choice": ["abbey"]})


def test_the_bytes_of_bytewise_tokens() -> None:
    found = token_bytes(BYTES._backend, BYTES.special_ids, 300)
    assert found[256:] == [None] * 44, "the special token, and ids without one"
    text = "Grüße, 你好 \U0001f600"
    assert b"".join(found[token] or b"" for token in BYTES.encode(text)) == text.encode()
