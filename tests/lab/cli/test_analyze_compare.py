"""`remask analyze compare` and `precision`: pages, differences, and what is refused."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from remask import LLM
from remask.cli import main
from remask.errors import ConfigError
from remask.policies import DkvDecode
from remask.request.sampling_params import SamplingParams
from remask_lab.bench.workload import random_workload
from remask_lab.records.record import read_record
from remask_lab.subjects.compare import Piece, compare, pieces, variant
from remask_lab.subjects.precision import (
    OTHER,
    USUAL,
    Arithmetic,
    Divergence,
    _divergence,
    arithmetics,
    measure_precision,
    reading,
)

VARIANTS = json.dumps(
    [
        "none",
        {"cache": "dkv-decode", "cache_config": {"refresh_interval": 4}},
        {"cache": "dllm-cache", "cache_config": {"ratio": 0, "response_interval": 99}},
        {"cache": "none", "sampling": {"steps": 1}},
    ]
)


def analyze(subject: str, *options: str) -> int:
    return main(["--quiet", "analyze", subject, "--device", "cpu", *options])


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
    files = ["--page", str(page), "--output", str(output)]
    options = ["--model", "bundled-transit", "--dtype", "float32", "--prompt", "table : abbey > mill ; from abbey go 1"]
    sampling = ["--sampling", '{"max_tokens": 8, "steps": 8, "block_length": 8, "ignore_eos": true}']
    assert analyze("compare", *options, *sampling, *files, "--variants", VARIANTS) == 0
    record = read_record(output, "analyze compare")
    (case,) = record.data["cases"]
    assert "abbey > mill" in case["prompt"]
    names = [answer["variant"] for answer in case["answers"]]
    assert names == [
        "none",
        "dkv-decode refresh_interval=4",
        "dllm-cache ratio=0, response_interval=99",
        "none steps=1",
    ]
    none, decode, held, short = case["answers"]
    assert none["agreement"] == 1
    assert not any(piece["differs"] for piece in none["pieces"])
    assert (none["forwards"], short["forwards"]) == (8, 1)
    assert decode["row_layers"] < none["row_layers"]
    assert held["agreement"] < 1
    told = Marked()
    told.feed(page.read_text(encoding="utf-8"))
    marked = [piece["text"] for answer in case["answers"] for piece in answer["pieces"] if piece["differs"]]
    assert told.marks[1:] == marked, "the first mark explains what marks are"
    assert "script" not in told.tags
    out = capsys.readouterr().out
    assert record.data["reading"] in out
    assert record.data["reading"] in page.read_text(encoding="utf-8").replace("&#39;", "'")


def test_what_models_and_users_write_is_escaped(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = [
        "--model",
        "bundled-transit",
        "--prompt",
        "<script>alert(1)</script> &",
        "--sampling",
        '{"max_tokens": 2}',
    ]
    assert analyze("compare", *options, "--variants", '["none"]', "--page", str(page)) == 0
    text = page.read_text(encoding="utf-8")
    assert "<script>" not in text


def test_pieces_mark_what_is_not_at_its_place() -> None:
    first = ["a", "b", "c", "d"]
    assert pieces(first, first) == [Piece("a b c d", False)]
    assert pieces(first, ["a", "x", "c", "d", "e"]) == [
        Piece("a", False),
        Piece("x", True),
        Piece("c d", False),
        Piece("e", True),
    ]
    assert pieces(first, []) == []


def test_models_without_words_are_compared_by_token_ids(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "x.json"
    source.write_text(json.dumps({"prompt_token_ids": [3, 4, 5]}))
    model = ["--model", "gidd-tiny", "--load-format", "dummy", "--dtype", "float32", "--input", str(source)]
    sampling = ["--sampling", '{"max_tokens": 4, "canvas_length": 16, "ignore_eos": true}']
    assert analyze("compare", *model, *sampling, "--variants", '["none", "block-prefix"]', "--output", str(output)) == 0
    (case,) = read_record(output).data["cases"]
    assert case["prompt"] == "3 4 5"
    none, cached = case["answers"]
    assert none["token_ids"] == cached["token_ids"], "the seed is the same, and the cache is exact"
    assert none["pieces"][0]["text"] == " ".join(map(str, none["token_ids"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--variants", "{"], "--variants is not JSON"),
        (["--variants", "{}"], "--variants must be a list"),
        (["--variants", "[]"], "needs a request and a variant"),
        (["--variants", "[1]"], "a variant is an object"),
        (["--variants", '[{"cach": "none"}]'], "a variant is an object of cache, cache_config and sampling"),
        (["--variants", '[{"cache": 1}]'], "cache is a name"),
        (["--variants", '["none", "none"]'], "variant 'none' is there twice"),
        (["--variants", '[{"sampling": {"step": 1}}]'], "Did you mean 'steps'"),
        (["--variants", '["uniform-cache"]'], "uniform-cache: this cache policy is not defined"),
        (["--variants", '["none"]', "--page", "no/where/p.html"], "--page: there is no folder"),
        (["--variants", '["none"]', "--page", "."], "--page: '.' cannot be written"),
    ],
)
def test_bad_comparisons(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert (
        analyze(
            "compare", "--model", "bundled-transit", "--prompt", "from", "--sampling", '{"max_tokens": 2}', *options
        )
        == 2
    )
    assert message in capsys.readouterr().err


def test_a_subject_without_pictures_has_no_option_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        analyze(
            "compare", "--model", "bundled-transit", "--prompt", "from", "--variants", '["none"]', "--plots", "plots"
        )
    assert "there is no option --plots" in capsys.readouterr().err


def test_nothing_to_compare() -> None:
    llm = LLM("llada-tiny", load_format="dummy", dtype="float32")
    with pytest.raises(ConfigError, match="needs a request"):
        compare(llm, [], [variant(llm, {})])


def test_a_variant_may_give_a_policy_object() -> None:
    llm = LLM("llada-tiny", load_format="dummy", dtype="float32")
    named = variant(llm, {"cache": "dkv-decode", "cache_config": {"refresh_interval": 3}})
    given = variant(llm, {"cache": DkvDecode(3)})
    assert given.policy == named.policy
    assert (given.name, named.name) == ("dkv-decode refresh_interval=3, shift=null", "dkv-decode refresh_interval=3")
    with pytest.raises(ConfigError, match="is for a policy that is named"):
        variant(llm, {"cache": DkvDecode(3), "cache_config": {"refresh_interval": 3}})


def test_precision_of_a_dummy_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots = tmp_path / "x.json", tmp_path / "plots"
    model = ["--model", "gidd-tiny", "--load-format", "dummy", "--requests", "4", "--batch", "2"]
    model += ["--prompt-tokens", "20"]
    sampling = ["--sampling", '{"max_tokens": 6, "canvas_length": 32, "block_length": 3}']
    assert analyze("precision", *model, *sampling, "--output", str(output), "--plots", str(plots)) == 0
    record = read_record(output, "analyze precision")
    rows = record.data["rows"]
    assert [(row["arithmetic"]["dtype"], row["arithmetic"]["cache"]) for row in rows] == [
        (dtype, cache) for dtype in ("float32", "bfloat16") for cache in ("none", "none", "block-prefix")
    ]
    assert rows[0]["tokens"] == rows[2]["tokens"] == 0, "in float32 the cache is exact"
    assert rows[4]["reference"] == rows[3]["arithmetic"]
    assert rows[3]["reference"] == rows[0]["arithmetic"]
    assert record.about["settings"]["dtypes"] == ["float32", "bfloat16"]
    assert record.data["reading"] in capsys.readouterr().out
    assert (plots / "precision.png").exists()


def test_other_kernels_run_where_the_usual_one_is_pytorchs() -> None:
    llm = LLM("llada-tiny", load_format="dummy", dtype="float32")
    workload = random_workload(llm, 3, 1, 0, SamplingParams(max_tokens=4, ignore_eos=True), 6, 4)
    usual = Arithmetic("float32", 1, "none", USUAL)
    assert [row.attention for row in arithmetics(llm, 2)] == [USUAL, USUAL, OTHER]
    rows = measure_precision([llm], workload, 2)
    assert [row.reference for row in rows] == [usual] * 3
    assert str(rows[2].arithmetic) == "float32, batch 1, softmax step by step"
    exact = LLM("sdar-tiny", load_format="dummy", dtype="float32")
    assert [row.cache for row in arithmetics(exact, 2)] == ["none", "none", "none", "exact"]
    for batch, message in ((1, "is no batch"), (4, "3 requests make no batch of 4")):
        with pytest.raises(ConfigError, match=message):
            measure_precision([llm], workload, batch)


def test_what_a_divergence_is() -> None:
    first, other = Arithmetic("float32", 1, "none", USUAL), Arithmetic("bfloat16", 1, "none", USUAL)
    found = _divergence(other, first, ((1, 2, 3, 4), (5, 6), (7,)), ((1, 2, 9, 9), (5, 6, 7, 8), (7,)), 0.5)
    assert (found.tokens, found.responses, found.onset) == (1 - (0.5 + 0.5 + 1) / 3, 2 / 3, 0.5)
    same = Divergence(first, first, 0.0, 0.0, 0.0, 1.0)
    told = reading([same, found, Divergence(first, other, 0.0, 0.0, 0.0, None)])
    assert told == (
        "Bfloat16, batch 1 changes 33.33 % of tokens, in 66.7 % of responses, against float32, batch 1, on average "
        "from 50 % of a response on. Not a token changes under float32, batch 1 (as bfloat16, batch 1). Accuracy lies "
        "between 50.0 % and 100.0 %."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "1"], "a batch of 1 is no batch"),
        (["--dtype", "float32"], "name them in --dtypes"),
        (["--dtypes", "float31"], "float31"),
        (["--requests", "0"], "--requests must be a whole number from 1"),
    ],
)
def test_bad_precision(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert analyze("precision", "--model", "llada-tiny", "--load-format", "dummy", *options) == 2
    assert message in capsys.readouterr().err
