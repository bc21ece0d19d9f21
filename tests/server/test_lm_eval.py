"""`lm-eval`'s `local-chat-completions` against a server, on four questions of the bundled task, offline."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from remask.tasks.transit import make_workload
from tests.server.serving import URL, Running

pytestmark = [
    pytest.mark.soak,  # importing lm-eval alone takes longer than most tests
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: pip install 'remask[eval]'"),
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


def test_an_evaluation_over_http(server: Running, tmp_path: Path) -> None:
    documents = tmp_path / "documents.jsonl"
    lines = [
        json.dumps({"system": item.prompt.text, "question": item.question.text, "reference": item.reference})
        for item in make_workload(4, 2, 9)
    ]
    documents.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "transit.yaml").write_text(TASK.format(documents=documents), encoding="utf-8")
    model = f"model=bundled,base_url={server.base}{URL},num_concurrent=2,max_retries=1,tokenized_requests=False"
    words = [sys.executable, "-m", "lm_eval", "run", "--model", "local-chat-completions", "--model_args", model]
    words += ["--tasks", "transit", "--include_path", str(tmp_path), "--apply_chat_template", "--log_samples"]
    words += ["--output_path", str(tmp_path / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        words,
        env={**os.environ, **offline, "OPENAI_API_KEY": "none"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    told = json.loads(file.read_text(encoding="utf-8"))["results"]["transit"]
    assert told["exact_match,none"] == 1, "the bundled model answers its task word for word"
