"""`remask bench` on prompts of one's own, and responses side by side."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from remask import LLM
from remask.cli import main
from remask.errors import ConfigError
from remask.policies import DkvDecode
from remask.request.sampling_params import SamplingParams
from remask_lab.bench.answers import changes
from remask_lab.bench.contenders import variants
from remask_lab.bench.workload import random_workload, says
from remask_lab.records.record import read_record

VARIANTS = json.dumps(
    [
        "none",
        {"cache": "dkv-decode", "cache_config": {"refresh_interval": 4}},
        {"cache": "dllm-cache", "cache_config": {"ratio": 0, "response_interval": 99}},
        {"cache": "none", "sampling": {"steps": 1}},
    ]
)
TRANSIT = ["--model", "bundled-transit", "--dtype", "float32"]


def bench(*options: str) -> int:
    return main(["--quiet", "bench", "--device", "cpu", "--rounds", "1", *options])


class Marked(HTMLParser):
    """Collects the texts that a page marks, and every tag that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[str] = []
        self.tags: set[str] = set()
        self._inside = False

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        self.tags.add(tag)
        self._inside = tag == "mark"

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.marks.append(data)


def test_a_page_of_responses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, output = tmp_path / "page.html", tmp_path / "x.json"
    files = ["--page", str(page), "--json", str(output), "--answers"]
    options = [*TRANSIT, "--prompt", "table : abbey > mill ; from abbey go 1"]
    sampling = ["--sampling", '{"max_tokens": 8, "steps": 8, "block_length": 8, "ignore_eos": true}']
    assert bench(*options, *sampling, *files, "--variants", VARIANTS) == 0
    record = read_record(output, "bench")
    (case,) = record.data["answers"]
    assert "abbey > mill" in case["prompt"]
    names = [answer["cache"] for answer in case["answers"]]
    assert names == [
        "none",
        "dkv-decode refresh_interval=4",
        "dllm-cache ratio=0, response_interval=99",
        "none steps=1",
    ]
    assert [row["cache"] for row in record.data["results"]] == names
    none, decode, held, short = case["answers"]
    assert none["agreement"] == 1
    assert (none["forwards"], short["forwards"]) == (8, 1)
    assert decode["row_layers"] < none["row_layers"]
    assert held["agreement"] < 1
    told = Marked()
    told.feed(page.read_text(encoding="utf-8"))
    runs = [changes(none["text"].split(), answer["text"].split()) for answer in case["answers"]]
    assert not any(differs for _, differs in runs[0])
    assert told.marks[1:] == [text for each in runs for text, differs in each if differs], "the first explains"
    assert "script" not in told.tags
    out = capsys.readouterr().out
    assert all(f"[{mark}]" in out for mark in told.marks[1:])
    for text in (out, page.read_text(encoding="utf-8")):
        assert "none steps=1: 0 of 1 responses are the same to the token as under none." in text


def test_what_models_and_users_write_is_escaped(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = [*TRANSIT, "--prompt", "<script>alert(1)</script> &", "--max-tokens", "2", "--caches", "none"]
    assert bench(*options, "--page", str(page)) == 0
    assert "<script>" not in page.read_text(encoding="utf-8")


def test_own_prompts_are_judged_where_they_carry_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line with its own sampling; without any answer there is no accuracy."""
    source, output = tmp_path / "in.jsonl", tmp_path / "x.json"
    system = {"role": "system", "content": "table : abbey > mill ; mill > cliff ; cliff > abbey ;"}
    lines: list[dict[str, Any]] = [
        {"messages": [system, {"role": "user", "content": f"from {stop} go 1 , where am i ?"}], "max_tokens": 8}
        for stop in ("abbey", "mill", "cliff")
    ]
    lines[2]["max_tokens"] = 6
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = [*TRANSIT, "--input", str(source), "--caches", "none,reuse", "--sampling", '{"block_length": 2}']
    assert bench(*options, "--json", str(output)) == 0
    settings = (record := read_record(output, "bench")).about["settings"]
    assert (settings["requests"], settings["prefixes"], settings["max_tokens"]) == (3, 1, "6 to 8")
    none, reuse = record.data["results"]
    assert none["accuracy"] is None
    assert none["agreement_with_none"] == 1
    assert reuse["row_layers"] < none["row_layers"]
    assert reuse["prefix_hits"] == 2
    told = LLM("bundled-transit", dtype="float32", cache="none").chat(
        lines[0]["messages"], {"max_tokens": 8, "block_length": 2}
    )[0]
    lines[0]["answer"], lines[1]["answer"] = (told.text or "").upper() + ".", "nowhere"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert bench(*options, "--json", str(output), "--answers") == 0
    record = read_record(output, "bench")
    assert record.data["results"][0]["accuracy"] == 0.5
    assert [case["answers"][0]["correct"] for case in record.data["answers"]] == [True, False, None]
    assert "(right answer: nowhere)" in capsys.readouterr().out
    assert bench(*options, "--requests", "1", "--json", str(output)) == 0
    assert read_record(output, "bench").about["settings"]["requests"] == 1


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("Mill", " mill.", True),
        ("two hops ## mill", "mill", True),
        ("mill and cliff", "mill", False),
        ("", "mill", False),
        ("It is\n 42", "it is 42", True),
    ],
)
def test_what_is_right(text: str, answer: str, right: bool) -> None:
    assert says(text, answer) is right


def test_pieces_mark_what_is_not_at_its_place() -> None:
    first = ["a", "b", "c", "d"]
    assert changes(first, first) == [("a b c d", False)]
    assert changes(first, ["a", "x", "c", "d", "e"]) == [("a", False), ("x", True), ("c d", False), ("e", True)]
    assert changes(first, []) == []


def test_models_without_words_are_compared_by_token_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "x.json"
    source.write_text(json.dumps({"prompt_token_ids": [3, 4, 5]}))
    model = ["--model", "gidd-tiny", "--load-format", "dummy", "--dtype", "float32", "--input", str(source)]
    sampling = ["--sampling", '{"max_tokens": 4, "uniform": {"canvas_length": 16}, "ignore_eos": true}']
    assert bench(*model, *sampling, "--caches", "none,block-prefix", "--answers", "--json", str(output)) == 0
    (case,) = read_record(output).data["answers"]
    none, cached = case["answers"]
    assert none["token_ids"] == cached["token_ids"], "the seed is the same, and the cache is exact"
    if none["text"] is None:
        assert case["prompt"] == "3 4 5"
        assert " ".join(map(str, none["token_ids"])) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([{"prompt": "from", "cache": "none"}], [], "line 1: cache is an option of the command"),
        ([{"prompt": "from", "answer": [1]}], [], "request 1: answer must be a text or a number, got [1]"),
        ([{"prompt": "from", "answr": "x"}], [], "answr"),
        ([], [], "holds no request"),
        (
            [{"prompt": "from", "max_tokens": 2}, {"prompt": "from", "max_tokens": 4}],
            ["--baseline-steps", "half"],
            "these requests have several",
        ),
    ],
)
def test_bad_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[object], options: list[str], message: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert bench(*TRANSIT, "--caches", "none", "--input", str(source), *options) == 2
    assert message in capsys.readouterr().err


def test_a_variant_may_give_a_policy_object() -> None:
    llm = LLM("llada-tiny", load_format="dummy", dtype="float32")
    work = random_workload(llm, requests=2, sampling=SamplingParams(max_tokens=4), prefix_tokens=4, prompt_tokens=4)
    given = {"cache": "dkv-decode", "cache_config": {"refresh_interval": 3}}
    named, own = variants(llm, [given, {"cache": DkvDecode(3)}], work)
    assert own.policy == named.policy
    assert (own.name, named.name) == ("dkv-decode refresh_interval=3, shift=null", "dkv-decode refresh_interval=3")
    assert own.baseline == named.baseline == named.name
    with pytest.raises(ConfigError, match="is for a policy that is named"):
        variants(llm, [{"cache": DkvDecode(3), "cache_config": {"refresh_interval": 3}}], work)
