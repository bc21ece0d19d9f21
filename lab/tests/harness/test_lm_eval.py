"""The engine as lm-eval's model, and our configs as lm-eval reads them. Offline: data sets are local files."""

import importlib.util
import json
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("needs lm-eval: make test EXTRAS=dev,eval", allow_module_level=True)

import datasets.config
from huggingface_hub import constants
from lab.tests.harness.records import RECORDS, perfect
from lab.tests.harness.scripted import scripted
from lm_eval.api.instance import Instance

from remask.cli import main
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask.tasks.transit import STOPS, make_workload
from remask_lab.harness import lm as lm_module
from remask_lab.harness import run
from remask_lab.harness.benchmark import FOLDER, benchmark, default_role, read_docs, read_shots, task_names, turns_of
from remask_lab.harness.lm import Harness, RemaskLM
from remask_lab.harness.run import run_local
from remask_lab.likelihood.masked import MaskDraws, MaskLikelihoods
from remask_lab.likelihood.passes import encode_pair
from remask_lab.records.record import read_record
from tests.depth.models import write_lines
from tests.waiting import LONGEST_S

pytestmark = pytest.mark.soak  # importing lm-eval alone takes longer than most tests

QUICK = {"max_tokens": 4, "steps": 2}
ASKED: dict[str, Any] = {"role": default_role(), "chat": True, "run_code": True}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled-transit", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=4))


@pytest.fixture(scope="module")
def harness() -> Harness:
    return Harness(own_only=True)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    for name in ("datasets.config.HF_HUB_OFFLINE", "huggingface_hub.constants.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, True)


def model(llm: LLM, policy: str = "none", sampling: Mapping[str, Any] = QUICK, **draws: Any) -> RemaskLM:
    return RemaskLM(llm, llm.session.policy(policy), sampling, 0, MaskLikelihoods(llm, MaskDraws(**draws)))


def local_harness(task: str, path: Path, **more: object) -> Harness:
    """lm-eval with our config of `task`, and `more`, over a local file in place of the published data set."""
    config = {"include": str(FOLDER / f"{task}.yaml"), "task": task, **more}
    split = "validation" if task == "remask_gpqa" else "test"
    source = {"dataset_path": "json", "dataset_name": None, "custom_dataset": None}
    kwargs = {"dataset_kwargs": {"data_files": {split: str(path)}}}
    folder = path.parent / "configs"
    folder.mkdir()
    (folder / f"{task}.yaml").write_text(json.dumps({**config, **source, f"{split}_split": split, **kwargs}))
    return Harness(own_only=True, folders=[str(folder)])


@pytest.mark.parametrize("task", task_names())
def test_our_configs_ask_and_score_as_local_data_does(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    name = task.removeprefix("remask_")
    path = write_lines(tmp_path / "x.jsonl", [RECORDS[name][0]] * 3)
    texts = [perfect(name), "## wrong\n```python\nwrong\n```", ""]
    for module in (run, lm_module):
        monkeypatch.setattr(module, "generate", scripted(texts))
    own = benchmark(task)
    none = llm.session.policy("none")
    ours = run_local(llm, own, read_docs(own, str(path)), role=default_role(), policy=none, sampling=QUICK, seed=0)
    theirs = local_harness(task, path).run(model(llm), task, **ASKED)
    for row in (ours, theirs):
        score = next(iter(row["metrics"]))
        assert [sample[score] for sample in row["samples"]] == [1, 0, 0]
        assert row["metrics"][score]["value"] == pytest.approx(1 / 3)
    assert theirs["metrics"] == ours["metrics"]
    same = ("token_ids", "text", "right")
    assert [[sample[key] for key in same] for sample in theirs["samples"]] == [
        [sample[key] for key in same] for sample in ours["samples"]
    ], "the same prompts, of the same shared prefix"
    for cost in ("row_layers", "forwards", "prefix_ratio", "completion_tokens"):
        assert theirs[cost] == ours[cost]


def test_worked_examples_before_published_questions_are_those_before_local_ones(llm: LLM, tmp_path: Path) -> None:
    record = RECORDS["gsm8k"][0]
    path = write_lines(tmp_path / "x.jsonl", [record, record | {"question": "And 3?"}])
    own = benchmark("remask_gsm8k")
    shots = read_shots(own, str(path), None, 2)
    docs, policy = read_docs(own, str(path)), llm.session.policy("reuse")
    ours = run_local(llm, own, docs, role=default_role(), policy=policy, sampling=QUICK, seed=0, shots=shots)
    with_examples = RemaskLM(llm, llm.session.policy("reuse"), QUICK, examples=turns_of(shots))
    harness = local_harness("remask_gsm8k", path)
    theirs = harness.run(with_examples, "remask_gsm8k", **ASKED)
    assert [each["token_ids"] for each in theirs["samples"]] == [each["token_ids"] for each in ours["samples"]]
    for cost in ("row_layers", "prefix_ratio", "prefix_hits"):
        assert theirs[cost] == ours[cost]
    assert theirs["prefix_ratio"] > harness.run(model(llm, "reuse"), "remask_gsm8k", **ASKED)["prefix_ratio"]


def test_the_command_puts_worked_examples_before_published_questions(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [RECORDS["gsm8k"][0]])
    local_harness("remask_gsm8k", path)
    given = ["--quiet", "eval", "tasks", "--model", "bundled-transit", "--dtype", "float32", "--device", "cpu"]
    given += ["--include-path", str(tmp_path / "configs"), "--tasks", "remask_gsm8k", "--caches", "none"]
    given += ["--sampling", json.dumps(QUICK), "--shot-data", str(path)]
    ratios = []
    for shots in ("1", "0"):
        output = tmp_path / f"{shots}.json"
        asked = [*given, "--shots", shots, "--output", str(output)]
        assert main(asked if shots == "1" else asked[: asked.index("--shot-data")] + asked[-2:]) == 0
        (row,) = read_record(output, "eval tasks").data["rows"]
        ratios.append(row["result"]["prefix_ratio"])
    assert ratios[0] > ratios[1]


def test_chats_share_their_prefix_under_a_cache(llm: LLM, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [RECORDS["gsm8k"][0], RECORDS["gsm8k"][0] | {"question": "And 3?"}])
    row = local_harness("remask_gsm8k", path).run(model(llm, "bicache"), "remask_gsm8k", **ASKED)
    assert row["prefix_hits"] == 1
    assert row["prefix_ratio"] > 0.8


def test_the_task_of_the_bundled_model_by_likelihood_and_by_generation(
    llm: LLM, tmp_path: Path, harness: Harness
) -> None:
    items = make_workload(6, 1, 5)
    lines = []
    for item in items:
        walked, _, _ = item.reference.rpartition(" ")
        others = [stop for stop in STOPS if stop != item.answer][:2]
        system = {"system": item.prompt.text, "question": item.question.text, "walked": walked}
        choices = {"choices": [others[0], item.answer, others[1]], "answer": 1}
        lines.append({**system, **choices, "reference": item.reference})
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(write_lines(tmp_path / "x.jsonl", lines))}},
        "test_split": "test",
        "description": "{{system}}",
    }
    choice = {
        **source,
        "task": "transit_choice",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "gen_prefix": "{{walked}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
    }
    row = harness.run(model(llm, samples=16), choice, chat=True)
    assert "seconds" not in row, "nothing was generated"
    assert row["metrics"]["acc,none"]["value"] >= 0.8
    assert row["metrics"]["acc,none"]["interval"][1] == 1
    written = {
        **source,
        "task": "transit_written",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{reference}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    row = harness.run(model(llm, "bicache", {"steps": 8, "block_length": 2}), written, chat=True)
    assert row["metrics"]["exact_match,none"]["value"] == 1
    assert row["prefix_hits"] == 5


def instance(*arguments: Any, kind: str = "loglikelihood", doc: int = 0) -> Any:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("t", doc, 1))


def test_likelihoods_are_the_estimators(llm: LLM) -> None:
    lm = model(llm, samples=32)
    pairs = [("from ivy go 1 ,", " where am i ?"), ("", "ivy > holly"), ("from ivy ", "go 1")]
    found = lm.loglikelihood([instance(*pair, doc=number) for number, pair in enumerate(pairs)])
    expected = MaskLikelihoods(llm, MaskDraws(samples=32)).score([encode_pair(llm, *pair) for pair in pairs], [0, 1, 2])
    assert [value for value, _ in found] == [each.log_likelihood for each in expected]
    assert lm.standard_errors == [each.standard_error for each in expected]


def test_greedy_continuations_are_told(llm: LLM) -> None:
    (output,) = llm.generate(["from ivy go 1 ,"], SamplingParams(max_tokens=3, ignore_eos=True), cache="none")
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode(output.token_ids, skip_special_tokens=False)
    ((_, greedy),) = model(llm).loglikelihood([instance("from ivy go 1 ,", text)])
    ((_, other),) = model(llm).loglikelihood([instance("from ivy go 1 ,", "go go go")])
    assert (greedy, other) == (True, False)


def test_whole_texts_are_scored_in_parts_where_they_are_long(llm: LLM) -> None:
    lm = model(llm, samples=16)
    estimator = MaskLikelihoods(llm, MaskDraws(samples=16))
    short, long = "ivy > holly", "ivy > holly " * 500
    one, two = lm.loglikelihood_rolling([instance(short), instance(long)])
    assert one == estimator.score([encode_pair(llm, "", short)], [0])[0].log_likelihood
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode(long)
    assert len(tokens) == 1500 > llm.model.config.max_length
    assert two < one


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"until": ["\n", ""], "max_gen_toks": 8}, {"max_tokens": 8, "stop": ("\n",)}),
        ({"until": "x"}, {"max_tokens": 256, "stop": ("x",)}),
        ({"do_sample": False, "temperature": 0.0, "top_p": 0.5}, {"top_p": None, "temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 4}, {"top_p": 0.9, "top_k": 4}),
    ],
)
def test_what_a_task_says_about_generation(llm: LLM, given: dict[str, Any], expected: dict[str, Any]) -> None:
    request = model(llm, sampling={"steps_per_block": 1})._request("0", "from ivy", given)
    assert {name: getattr(request.params, name) for name in expected} == expected
    assert request.prefix_length == 0


def test_what_cannot_be_asked(llm: LLM, harness: Harness, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Unknown generation parameter 'num_beams'"):
        model(llm).generate_until([instance("from ivy", {"num_beams": 2}, kind="generate_until")])
    with pytest.raises(ConfigError, match="needs log-likelihoods"):
        RemaskLM(llm, llm.session.policy("none"), {}).loglikelihood([instance("a", "b")])
    with pytest.raises(ConfigError, match="no tokenizer"):
        RemaskLM(LLM("llada-tiny", load_format="dummy", dtype="float32"), llm.session.policy("none"), {})
    with pytest.raises(ConfigError, match="Unknown task 'gsm9k'"):
        harness.check(["gsm9k"])
    (tmp_path / "tagged").mkdir()
    (tmp_path / "tagged" / "x.yaml").write_text(json.dumps({"task": "x", "tag": "several", "dataset_path": "json"}))
    with pytest.raises(ConfigError, match="'several' is a tag"):
        Harness(own_only=True, folders=[str(tmp_path / "tagged")]).check(["x", "several"])
    (tmp_path / "z").mkdir()
    path = write_lines(tmp_path / "z" / "x.jsonl", [RECORDS["gsm8k"][0]])
    with pytest.raises(ConfigError, match="marked as unsafe"):
        local_harness("remask_gsm8k", path, unsafe_code=True).run(
            model(llm), "remask_gsm8k", **(ASKED | {"run_code": False})
        )
    (tmp_path / "y").mkdir()
    path = write_lines(tmp_path / "y" / "y.jsonl", [{"question": "?"}])
    with pytest.raises(ConfigError, match="record 0: has no field 'answer'"):
        local_harness("remask_gsm8k", path).run(model(llm), "remask_gsm8k", **ASKED)


def test_the_command_and_data_that_are_not_at_hand(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--quiet", "eval", "tasks", "--model", "bundled-transit", "--dtype", "float32", "--device", "cpu"]
    assert main([*given, "--tasks", "remask_gsm8k"]) == 2
    told = capsys.readouterr().err
    assert "lm-eval cannot run 'remask_gsm8k'" in told
    assert "The hub cannot be reached: give local data by --data" in told


def test_without_a_network_data_sets_come_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offline = ("datasets.config.HF_HUB_OFFLINE", "datasets.config.HF_DATASETS_OFFLINE")
    for name in (*offline, "huggingface_hub.constants.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, False)
    monkeypatch.setattr(lm_module, "getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", there)
        monkeypatch.setattr(lm_module, "SECONDS", LONGEST_S)
        lm_module.go_offline_without_network()
        assert not constants.HF_HUB_OFFLINE
    lm_module.go_offline_without_network()
    assert constants.HF_HUB_OFFLINE
    assert datasets.config.HF_DATASETS_OFFLINE
    assert f"{there} cannot be reached" in caplog.text


def test_a_name_that_nobody_looks_up_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_module, "SECONDS", 0.1)
    asked, looked_up = threading.Event(), threading.Event()

    def look_up(*_: object) -> None:
        asked.set()
        looked_up.wait(LONGEST_S)
        raise OSError("nobody knows the name")

    monkeypatch.setattr(socket, "create_connection", look_up)
    try:
        assert not lm_module.reachable("https://nowhere")
        assert asked.wait(LONGEST_S)
    finally:
        looked_up.set()


def test_the_command_measures_likelihoods_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config of the user's own stands for lm-eval's tasks, whose data are on the hub."""
    lines = [{"question": "from ivy", "choices": ["go", "ivy"], "answer": 0}] * 2
    config = {
        "task": "stops",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(write_lines(tmp_path / "x.jsonl", lines))}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
    }
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "stops.yaml").write_text(json.dumps(config))
    output = tmp_path / "out.json"
    given = ["--quiet", "eval", "tasks", "--model", "bundled-transit", "--dtype", "float32", "--device", "cpu"]
    given += ["--include-path", str(folder)]
    options = ["--tasks", "stops", "--caches", "none,bicache", "--output", str(output), "--mc-samples", "16"]
    assert main([*given, *options]) == 0
    told = capsys.readouterr().out
    assert "stops scores log-likelihoods, which use no cache, so it is measured once." in told
    assert "acc,none " in told
    (row,) = read_record(output, "eval tasks").data["rows"]
    assert row["point"]["cache"] == "none"
