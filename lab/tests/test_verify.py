"""`remask verify` on tiny checkpoints of every family: against transformers' classes, and code that they bring."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from lab.tests.own_code import AUTO_MAP, CODE, FILE

import tests.goldens as llada
from remask.cli import main
from remask.families import FAMILIES
from remask_lab.verify import compare as compared
from remask_lab.verify.reference import BASES, WAYS, Spec, serve
from tests.checkpoint.checkpoints import FAST_DLLM_V2, ILLADA, random_tensors, write
from tests.goldens import a2d, block_causal, llada22, moe, nemotron, sumi, uniform
from tests.leftovers import lasting_folder
from tests.oracles import diffusion_gemma

BY_CLASSES: dict[str, Callable[[], Path]] = {
    "llada": partial(llada.model_dir, "llada"),
    "dream": partial(llada.model_dir, "dream"),
    "sdar": partial(block_causal.model_dir, "sdar_b4"),
    "sdar-moe": partial(moe.model_dir, "sdar_moe_b8"),
    "a2d": partial(a2d.model_dir, "a2d-llama"),
    "a2d with biases": partial(a2d.model_dir, "a2d-qwen2"),
    "a2d with norms": partial(a2d.model_dir, "a2d-qwen3"),
    "modernbert": partial(a2d.model_dir, "modernbert"),
    "stable-diffcoder": partial(a2d.model_dir, "stable-diffcoder"),
    "nemotron-labs-diffusion": lambda: nemotron.ROOT,
    "illada": lambda: _random("illada", ILLADA),
    "fast-dllm-v2": lambda: _random("fast-dllm-v2", FAST_DLLM_V2),
    "diffusion-gemma": lambda: (
        diffusion_gemma.make("canvases of 3", lasting_folder() / "gemma-verified", told=0.03).folder
    ),
}
BY_OWN_CODE: dict[str, Callable[[], Path]] = {
    "gidd": partial(uniform.model_dir, "gentle"),
    "sumi": lambda: sumi.ROOT / "plain",
    "llada-moe": partial(moe.model_dir, "llada_moe_dense"),
    "llada2": partial(moe.model_dir, "llada2_flash"),
    "llada2 that edits": lambda: llada22.ROOT / "calm",
}
QUICK = ("llada", "sdar", "gidd")


def _random(name: str, raw: dict[str, Any]) -> Path:
    return write(lasting_folder() / f"{name}-verified", raw, random_tensors(raw))


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference in a thread: a process imports PyTorch and transformers anew."""

    @contextmanager
    def thread(asked: Spec) -> Iterator[Connection]:
        here, there = Pipe()

        def run() -> None:
            with there:
                serve(there, asked)

        beside = Thread(target=run)
        beside.start()
        try:
            yield here
        finally:
            here.close()
            beside.join()

    monkeypatch.setattr(compared, "_process", thread)


def with_code(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint that brings its code."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | {"auto_map": AUTO_MAP}
    (target / "config.json").write_text(json.dumps(config))
    (target / FILE).write_text(CODE)
    return target


def marked(names: Any) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.thorough) for name in names]


@pytest.mark.parametrize("name", marked(BY_CLASSES))
def test_models_are_those_of_transformers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--quiet", "verify", str(BY_CLASSES[name]()), "--max-tokens", "12"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0, lines
    assert len(lines) == 10
    assert lines[0].endswith(": equal")
    assert lines[1].startswith("reference: transformers' ")
    assert f"model: {name.partition(' ')[0]}, " in lines[2]
    assert " the same; nowhere another" in lines[6]
    assert lines[7].endswith(" steps, the same")


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", marked(BY_OWN_CODE))
def test_models_are_those_of_the_code_that_they_bring(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = with_code(BY_OWN_CODE[name](), tmp_path / "model")
    asked = ["--quiet", "verify", str(folder), "--max-tokens", "12"]
    if name not in BASES:
        assert main(asked) == 2, "nobody allowed it to be run"
        assert "AutoModelForCausalLM in its folder. Read it, and allow it to be run" in capsys.readouterr().err
    assert main([*asked, "--trust-remote-code"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "reference: the checkpoint's own OwnModel, float32 on cpu"
    assert lines[0].endswith(": equal")


def test_every_family_is_verified() -> None:
    names = {name.partition(" ")[0] for name in (*BY_CLASSES, *BY_OWN_CODE)}
    assert names == {family.name for family in FAMILIES}, "add a folder to BY_CLASSES or BY_OWN_CODE"


def test_what_differs_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference reads another base of RoPE, as a mistake of the family's reader would have it."""

    own = {"overrides": {"rope_theta": 20.0}}
    monkeypatch.setattr(compared, "Spec", lambda **given: Spec(**given | own))
    assert main(["--quiet", "verify", str(llada.model_dir("llada")), "--max-tokens", "12"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": NOT EQUAL")
    assert "pass 1, position 1" in lines[6]
    assert "not the same from token " in lines[7]


def test_code_that_takes_no_mask_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Llama's rows see what is before them, unless a mask says otherwise."""
    monkeypatch.setattr("remask_lab.verify.reference.WAYS", {"no mask": WAYS["no mask"]})
    assert main(["--quiet", "verify", str(llada.model_dir("llada")), "--max-tokens", "4"]) == 2
    said = "reference: its code takes no mask under which rows see what they should: with no mask: row 0 does not see"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smollm2", "only a folder or hub id with safetensors"),
        (str(llada.ROOT / "gguf" / "dream-f16.gguf"), "only a folder or hub id with safetensors"),
    ],
)
def test_what_cannot_be_compared_is_refused(model: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quiet", "verify", model]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.thorough
def test_a_process_that_ends_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.undo()  # with the real process, which cannot load what is not there
    folder = llada.model_dir("llada")
    assert main(["--quiet", "verify", str(folder), "--max-tokens", "4"]) == 0
    assert ": equal\n" in capsys.readouterr().out


def test_files_that_are_not_the_class_s_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors that transformers would draw at random, with a warning."""
    here, there = Pipe()
    raw = ILLADA | {"tie_word_embeddings": True}
    tensors = {name: each for name, each in random_tensors(raw).items() if "layers.1." not in name}
    folder = write(tmp_path / "model", raw, tensors)
    serve(there, Spec(str(folder), "illada", {}, "float32", "cpu", trusted=False, windowed=False))
    assert "the files are not those of transformers' LlamaForCausalLM: missing keys" in here.recv()
    torch.set_grad_enabled(True)
