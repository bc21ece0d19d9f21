"""What a command is given is checked before PyTorch is imported, and so is what needs no model at all."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from remask.checkpoint.shelf import SHELF
from remask.checks import BUNDLED_MODELS
from remask.cli.commands import all_commands
from tests import goldens

# Runs commands in one process in which whoever imports PyTorch fails, and prints what each came to, as JSON.
ALONE = """
import contextlib, io, json, sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise AssertionError("PyTorch is imported")
sys.meta_path.insert(0, Refused())
from remask.cli import main
found = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code
    found.append([status, out.getvalue(), err.getvalue()])
import remask
found.append([sorted(name for name in sys.modules if name.partition(".")[0] == "torch"), "", ""])
print(json.dumps(found))
"""


def alone(*commands: list[str], folder: Path) -> list[tuple[int, str, str]]:
    """The status of each command, and what it printed and told; PyTorch cannot be imported."""
    environment = os.environ | {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        input=json.dumps(commands),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    *found, modules = json.loads(done.stdout)
    assert modules[0] == []
    return [(status, out, err) for status, out, err in found]


START = """
import json, sys
from remask.cli import main
import remask.server.app
assert main(["--quiet", "generate", "--model", sys.argv[1], "--prompt", "ab", "--sampling", '{"max_tokens": 4}']) == 0
print("\\n" + json.dumps(sorted({name.partition(".")[0] for name in sys.modules} | {*sys.modules})))
"""


@pytest.mark.thorough
def test_a_first_answer_on_a_cpu_imports_nothing_that_takes_long_and_is_not_needed() -> None:
    """Each of these takes from a fifth of a second to two seconds of CPU time."""
    command = [sys.executable, "-c", START, str(goldens.ROOT / "gguf" / "llada-f32.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert "torch" in modules
    assert not modules & {"transformers", "triton", "sympy", "torch._dynamo", "torch._inductor", "scipy", "matplotlib"}


def test_mistakes_are_told_before_pytorch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "dream-7b").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "gpt_neox"}')
    (tmp_path / "lines.jsonl").write_text("[1]\nnone\n")
    prompt = ["--prompt", "x"]
    bundled, generate = ["--model", "bundled"], ["generate", "--model", "bundled", *prompt]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases: dict[str, list[str]] = {
            "Did you mean 'llada-8b'": ["serve", "lada-8b"],
            "Did you mean 'bundled'": ["generate", "--model", "bundledd", *prompt],
            "Did you mean 'smollm2'": ["run", "SmolLM-2"],
            "Did you mean 'other'": ["generate", "--model", "othr", *prompt],
            "There is no model 'no'": ["chat", "no"],
            "no such folder": ["profile", "--model", "no/such/folder"],
            "the model is an empty text": ["serve", ""],
            "Presets: a2d-": ["inspect", "model", "no"],
            "empty/config.json does not exist": ["serve", "empty"],
            "Unknown model_type 'gpt_neox'": ["generate", "--model", "other", *prompt],
            "Unknown preset 'llada-9b'": ["bench", "--model", "llada-9b", "--load-format", "dummy"],
            "There is no adapter 'no'": [*generate, "--adapter", "no"],
            "Unknown sampling parameter 'x'": ["serve", "--sampling", '{"x": 1}'],
            "max_tokens must be": [*generate, "--sampling", '{"max_tokens": "a"}'],
            "--sampling is not JSON": ["chat", "--sampling", "{"],
            "--cache-config is not JSON": ["decide", *bundled, "--input", "lines.jsonl", "--cache-config", "{"],
            "--hf-overrides must be": [*generate, "--hf-overrides", "[]"],
            "Unknown cache policy 'nne'": ["bench", *bundled, "--caches", "nne"],
            "Unknown dtype 'float61'": [*generate, "--dtype", "float61"],
            "max_num_seqs must be": ["serve", "--max-num-seqs", "0"],
            "max_queue must be": ["serve", "--max-queue", "-1", "--port", "0"],
            f"--port {port}: cannot listen there: Address already in use": ["serve", "no", "--port", port],
            "--port must be": ["serve", "--port", "99999"],
            "no line of the file is an object": ["generate", *bundled, "--input", "lines.jsonl"],
            "--input lines.jsonl": ["decide", *bundled, "--input", "lines.jsonl"],
            "--output: there is no folder": [*generate, "--output", "no/answers.jsonl"],
            "--system goes with --prompt": ["generate", *bundled, "--input", "lines.jsonl", "--system", "x"],
            "Did you mean 'sdar-1.7b'": ["models", "pull", "sdar-17b"],
            "'dream-7b' is a path in this folder": ["models", "pull", "dream-7b"],
            "Did you mean 'int8'": ["quantize", *bundled, "--quantization", "int3", "--output", "x"],
            "Did you mean 'generate'": ["generat"],
            "Did you mean 'bicache'": [*generate, "--cache", "bicahe"],
            "Unknown cache policy 'bicahe'": ["chat", "--cache", "bicahe"],
            "--depth-table: there is no file": [*generate, "--depth-table", "nowhere.json"],
            "--input: there is no file 'nowhere.jsonl'": ["profile", *bundled, "--prompts", "nowhere.jsonl"],
            "--output: there is no folder 'nowhere'": ["profile", *bundled, "--output", "nowhere/depth.json"],
            "--prompts: there is no file": ["eval", "gen-ppl", *bundled, "--judge", "x", "--prompts", "nowhere.txt"],
            "--sampling must be a JSON object": [*generate, "--sampling", "[1]"],
            "Did you mean 'float32'": ["chat", "--dtype", "float31"],
            "--chat-template": ["serve", "--chat-template", "/nowhere.jinja"],
            "--host 203.0.113.7 --port 0: cannot listen there": ["serve", "--host", "203.0.113.7", "--port", "0"],
            "no.such.host.invalid": ["serve", "--host", "no.such.host.invalid"],
            f"{'x' * 70} --port 8000: cannot listen there": ["serve", "--host", "x" * 70],
        }
        found = alone(*cases.values(), folder=tmp_path)
    for (said, words), (status, out, told) in zip(cases.items(), found, strict=True):
        assert (status, out) == (2, ""), words
        assert said in told, words


def test_lists_and_help_need_no_pytorch(tmp_path: Path) -> None:
    helps = [[*name.split(), "--help"] for name in all_commands()]
    subjects = [["inspect", "model", "--help"], ["analyze", "depth", "--help"], ["eval", "tasks", "--help=all"]]
    listed, again, version, *found = alone(
        ["models", "--memory", "24"], ["list", "--memory", "24"], ["--version"], *helps, *subjects, folder=tmp_path
    )
    assert listed == again
    names = [line.split()[0] for line in listed[1].splitlines()]
    assert names == ["name", *BUNDLED_MODELS, *SHELF]
    assert version[1].startswith("remask ")
    for status, out, _ in found:
        assert status == 0
        assert out.startswith("usage: remask")
