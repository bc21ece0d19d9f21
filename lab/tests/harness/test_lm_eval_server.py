"""`lm-eval`'s `local-chat-completions` against a server, on questions of the bundled task, offline."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remask.tasks.transit import make_workload
from remask_lab.harness.benchmark import FOLDER
from tests.server.serving import URL, Running

pytestmark = [
    pytest.mark.soak,  # importing lm-eval alone takes longer than most tests
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: make soak EXTRAS=dev,eval"),
]

TASK = """
task: transit
dataset_path: json
dataset_kwargs:
  data_files:
    test: {documents}
test_split: test
output_type: generate_until
description: "{{{{system}}}}"
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{reference}}}}"
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 16
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


# Our own config over local data: the bundled task's table stands for the role, its questions for the inputs.
STRICT = """
include: {config}
task: remask_local
custom_dataset: null
dataset_path: json
dataset_kwargs:
  data_files:
    test: {documents}
"""


def evaluate(server: Running, folder: Path, task: str, *options: str) -> Any:
    """What `lm_eval` finds on `task`, whose config is in `folder`."""
    model = f"model=bundled-transit,base_url={server.base}{URL},num_concurrent=2,max_retries=1,tokenized_requests=False"
    words = [sys.executable, "-m", "lm_eval", "run", "--model", "local-chat-completions", "--model_args", model]
    words += ["--tasks", task, "--include_path", str(folder), "--apply_chat_template", "--log_samples"]
    words += ["--output_path", str(folder / "out"), *options]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    done = subprocess.run(
        words,
        env={**os.environ, **offline, "OPENAI_API_KEY": "none"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (folder / "out").rglob("results_*.json")
    return json.loads(file.read_text(encoding="utf-8"))["results"][task]


def test_an_evaluation_over_http(server: Running, tmp_path: Path) -> None:
    documents = tmp_path / "documents.jsonl"
    lines = [
        json.dumps({"system": item.prompt.text, "question": item.question.text, "reference": item.reference})
        for item in make_workload(4, 2, 9)
    ]
    documents.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "transit.yaml").write_text(TASK.format(documents=documents), encoding="utf-8")
    told = evaluate(server, tmp_path, "transit")
    assert told["exact_match,none"] == 1, "the bundled model answers its task word for word"


def test_our_own_config_over_http(server: Running, tmp_path: Path) -> None:
    documents, items = tmp_path / "documents.jsonl", make_workload(8, 1, 3)
    lines = [json.dumps({"input": item.question.text, "target": item.answer}) for item in items]
    documents.write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = STRICT.format(config=FOLDER / "remask_bbh.yaml", documents=documents)
    (tmp_path / "local.yaml").write_text(config, encoding="utf-8")
    options = ["--system_instruction", items[0].prompt.text, "--gen_kwargs", "max_gen_toks=16"]
    told = evaluate(server, tmp_path, "remask_local", *options)
    assert told["strict_match,none"] > 0.2, "by chance it would be 2 %"
    assert told["same_answer,none"] >= told["strict_match,none"]
