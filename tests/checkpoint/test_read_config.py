from pathlib import Path
from typing import Any

import pytest

from remask.checkpoint.load import read_config
from remask.errors import CheckpointError
from tests.checkpoint.checkpoints import DREAM, FAST_DLLM_V2, GIDD, LLADA, SDAR, random_tensors, write


def test_stop_ids_of_the_generation_config_are_added(tmp_path: Path) -> None:
    folder = write(tmp_path, DREAM, random_tensors(DREAM))
    (folder / "generation_config.json").write_text('{"eos_token_id": [37, 38]}')
    family, config = read_config(folder)
    assert family.name == "dream"
    assert config.stop_ids == (38, 37)
    (folder / "generation_config.json").write_text('{"eos_token_id": 99}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: 'eos_token_id' is 99.*below 40"):
        read_config(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not valid JSON"), ("{", "not valid JSON"), ("[1]", "JSON list"), ("[" * 100_000, "not valid JSON")],
    ids=["empty", "open", "list", "deep"],
)
def test_a_malformed_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"(?s)config\.json.*{message}"):
        read_config(tmp_path)


def test_a_config_that_is_not_text_or_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)


def test_an_unfit_config_names_its_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(write(tmp_path, LLADA | {"alibi": True}, random_tensors(LLADA)))
    assert str(tmp_path) in str(caught.value)
    assert "'alibi' is true; supported: false" in str(caught.value)


@pytest.mark.parametrize("huge", [2**70, 10**15, 10**9, 2**24 + 1])
@pytest.mark.parametrize(
    ("raw", "key", "most"),
    [
        *(
            (LLADA, key, 2**20)
            for key in ("d_model", "n_heads", "n_kv_heads", "mlp_hidden_size", "max_sequence_length")
        ),
        (LLADA, "n_layers", 4096),
        (LLADA, "vocab_size", 2**24),
        (LLADA, "embedding_size", 2**24),
        *((DREAM, key, 2**20) for key in ("hidden_size", "intermediate_size", "max_position_embeddings")),
        (DREAM, "num_hidden_layers", 4096),
        (DREAM, "vocab_size", 2**24),
        (GIDD, "num_hidden_layers", 4096),
        (GIDD, "vocab_size", 2**24),
        (GIDD, "max_position_embeddings", 2**20),
        (SDAR, "head_dim", 2**20),
        (SDAR, "block_size", 1024),
        (FAST_DLLM_V2, "bd_size", 1024),
    ],
)
def test_sizes_that_no_model_has_are_refused(
    tmp_path: Path, raw: dict[str, Any], key: str, most: int, huge: int
) -> None:
    with pytest.raises(CheckpointError, match=rf"'{key}' is {huge}; supported: an integer from \d to {most}\."):
        read_config(write(tmp_path, raw | {key: huge}, {}))


def test_an_error_repeats_a_long_value_in_part_only(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(write(tmp_path, LLADA | {"n_layers": "9" * 10_000}, {}))
    assert len(str(caught.value)) < 500
