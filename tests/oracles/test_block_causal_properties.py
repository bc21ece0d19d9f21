"""What must hold for the block-causal oracle's rules beyond the recorded runs."""

import pytest

from tests.goldens import block_causal as goldens
from tests.oracles.block_causal import (
    decode,
    rule_of,
)
from tests.oracles.decode import decode as decode_any
from tests.oracles.decode import load
from tests.oracles.page_chain import Pool
from tests.oracles.sdar import SdarModel


def golden_model(name: str) -> SdarModel:
    model = load(goldens.model_dir(name))
    assert isinstance(model, SdarModel)
    return model


def test_rules_without_an_oracle_are_refused() -> None:
    with pytest.raises(ValueError, match="random"):
        rule_of({"remasking": "random"})
    line = {"prompt_token_ids": [1], "cache": "exact", "sampling": {"max_tokens": 4}}
    with pytest.raises(ValueError, match="reuse"):
        decode(golden_model("sdar_b4"), line | {"cache": "reuse"})
    with pytest.raises(ValueError, match="temperature 0"):
        decode(golden_model("sdar_b4"), line | {"sampling": {"max_tokens": 4, "temperature": 1.0}})


def test_a_prompts_own_stop_id_does_not_stop_but_a_generated_one_ends_its_block() -> None:
    model = golden_model("sdar_b4")
    sampling = {"max_tokens": 13, "block_length": 4, "steps_per_block": 2, "remasking": "low_confidence"}
    line = {"prompt_token_ids": goldens.prompts()["p05"], "cache": "none", "sampling": sampling}
    plain = decode(model, line)
    assert (len(plain.output_ids), len(plain.committed)) == (13, 20)
    in_prompt = goldens.prompts()["p05"][-1]
    assert in_prompt not in plain.committed[7:]
    assert decode(model, line | {"sampling": sampling | {"stop_token_ids": [in_prompt]}}) == plain
    stop = plain.committed[8]
    stopped = decode(model, line | {"sampling": sampling | {"stop_token_ids": [stop]}})
    assert stopped.committed == plain.committed[: len(stopped.committed)]
    assert len(stopped.committed) <= 12
    assert stopped.output_ids[-1] == stop
    assert decode_any(model, line) == plain


def test_steps_beyond_the_schedule_fill_what_is_left() -> None:
    """A leftmost window may hold fewer masks than its count, so that a schedule ends before its block."""
    model = golden_model("sdar_b8")
    line = {
        "prompt_token_ids": goldens.prompts()["p03"],
        "cache": "exact",
        "sampling": {"max_tokens": 30, "steps_per_block": 2, "threshold": 0.35, "fallback": "leftmost"},
    }
    done = decode(model, line)
    assert model.mask_id not in done.committed
    filled = sorted(position for _, positions, _ in done.transfers for position in positions)
    assert filled == list(range(4, len(done.committed)))


def test_pages_are_found_by_all_that_stands_left_of_them() -> None:
    pool = Pool(4)
    pool.publish([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pool.hit_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9], 9) == 8
    assert pool.hit_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9], 7) == 4, "a page beyond the prefilled part does not count"
    assert pool.hit_tokens([0, 2, 3, 4, 5, 6, 7, 8], 8) == 0, "the same second page after another first"
    assert pool.hit_tokens([1, 2, 3, 4, 5, 6, 7, 0], 8) == 4
