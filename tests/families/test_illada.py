"""iLLaDA as a user meets it: a folder in its layout, and nothing else said."""

from pathlib import Path

import httpx
import pytest

from remask import LLM, SamplingParams
from remask.errors import CheckpointError
from tests.checkpoint.checkpoints import DREAM, ILLADA, random_tensors, write
from tests.cli.test_serve import served
from tests.depth.models import with_ascii_tokenizer
from tests.server.serving import URL
from tests.waiting import LONGEST_S

RAW = ILLADA | {"max_position_embeddings": 128, "vocab_size": 64}
PROMPT = [7, 9, 11, 13]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write(tmp_path / "model", RAW, random_tensors(RAW)))


def test_what_is_left_open_is_decoded_on_a_canvas_that_grows_by_32(folder: str) -> None:
    llm = LLM(folder, dtype="float32")
    fixed = SamplingParams(max_tokens=70, ignore_eos=True, blocks={"growing_canvas": False})
    (by_default,) = llm.generate([PROMPT], {"ignore_eos": True, "max_tokens": 70})
    (complete,) = llm.generate([PROMPT], SamplingParams(max_tokens=70, ignore_eos=True))
    (whole,) = llm.generate([PROMPT], fixed)
    assert by_default.token_ids == complete.token_ids
    (said,) = llm.generate(
        [PROMPT], {"ignore_eos": True, "max_tokens": 70, "blocks": {"growing_canvas": True}, "block_length": 32}
    )
    assert said.token_ids == by_default.token_ids
    layers = RAW["num_hidden_layers"]
    assert by_default.usage.row_layers == layers * (32 * 36 + 32 * 68 + 6 * 74)
    assert whole.usage.row_layers == layers * 70 * 74
    assert 5 not in by_default.token_ids


@pytest.mark.thorough
def test_remask_serve_needs_the_folder_alone(tmp_path: Path) -> None:
    """A chat over HTTP computes what a canvas computes that grows by 32, and not what the whole one does."""
    model = ILLADA | {"max_position_embeddings": 256, "vocab_size": 128}
    folder = write(tmp_path / "raw", model, random_tensors(model))
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 70, "ignore_eos": True}
    with served(str(with_ascii_tokenizer(folder, tmp_path / "model"))) as process:
        grown, whole = (
            httpx.post(f"{process.base}{URL}", json={**body, **more}, timeout=LONGEST_S).json()
            for more in ({}, {"blocks": {"growing_canvas": False}})
        )
    prompt, layers = grown["usage"]["prompt_tokens"], model["num_hidden_layers"]
    assert grown["usage"]["completion_tokens"] == 70
    lengths = [prompt + 32] * 32 + [prompt + 64] * 32 + [prompt + 70] * 6
    assert grown["remask"]["row_layers"] <= layers * sum(lengths) < whole["remask"]["row_layers"]


def test_a_folder_that_is_not_as_described_is_refused_before_it_is_read(tmp_path: Path) -> None:
    tensors = random_tensors(DREAM)  # with biases, and a head of its own
    with pytest.raises(CheckpointError, match=r"6 unexpected: .*k_proj\.bias"):
        LLM(str(write(tmp_path, ILLADA | {"vocab_size": DREAM["vocab_size"]}, tensors)))
