"""A key that bears on numbers is read or refused: every family, in the spelling of transformers 4 and of 5."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from remask.checkpoint.files import read_sampling
from remask.checkpoint.load import read_config
from remask.errors import CheckpointError
from remask.families import FAMILIES, Family
from remask.families.fields import ORIGINAL, SIZE, SPELLINGS
from remask.model.arithmetic import frequencies, rope
from tests.checkpoint.checkpoints import write
from tests.engine.support import CPU
from tests.families.test_families import RAW

PLAIN = [family for family in FAMILIES if family.name not in ("modernbert", "diffusion-gemma")]
"""Families with one RoPE for all layers."""
EACH = pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.name)
PARTIAL = ("llada-moe", "llada2")
"""Families whose class turns a share of a head's channels; both tables below have one half."""

UNSCALED = ("llada", "gidd", "illada")
"""Families whose authors' code scales no positions, or is not public."""

SCALED: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 8, "truncate": False},
    {"rope_type": "yarn", "factor": 0.5, "attention_factor": 1.5, "beta_fast": 4.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-9},  # the range ends past the last pair
    {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
)
REFUSED: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 0},
    {"rope_type": "linear", "factor": 2.0, "beta_fast": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "beta_slow": -1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32},
    {"rope_type": "su", "factor": 2.0},
    {"rope_type": ["yarn"], "factor": 2.0},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
    {"rope_type": "default", "mrope_section": [1, 1]},
    {"rope_type": "default", "type": "linear"},
    {"factor": 2.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 3.0}},
)

# Values of keys that change what is computed, where no tensor's name or shape would show it.
BEARING: tuple[tuple[str, Any], ...] = (
    ("rope_theta", 777.0),
    ("partial_rotary_factor", 0.25),
    ("rotary_dim", 6),
    ("head_dim", 64),
    ("use_sliding_window", True),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("rms_norm_eps", 0.25),
    ("mask_token_id", 11),
    ("eos_token_id", 12),
    *((spelling, scaled) for spelling in SPELLINGS for scaled in (*SCALED, *REFUSED, "linear", [{"rope_theta": 3.0}])),
    *((spelling, {"rope_type": "default", "rope_theta": 777.0}) for spelling in SPELLINGS),
    *((spelling, {"rope_type": "default", "partial_rotary_factor": 0.25}) for spelling in SPELLINGS),
)


def moved(raw: Mapping[str, Any], spelling: str, **more: Any) -> dict[str, Any]:
    """`raw` with the parameters of RoPE in one object, as transformers 5 writes them."""
    names = ("rope_theta", "partial_rotary_factor")
    inner = {name: raw[name] for name in names if name in raw}
    rest = {key: value for key, value in raw.items() if key not in (*names, *SPELLINGS)}
    return {**rest, spelling: {"rope_type": "default", **inner, **more}}


@EACH
@pytest.mark.parametrize(("key", "value"), BEARING, ids=str)
def test_a_key_that_bears_on_numbers_is_read_or_refused(family: Family, key: str, value: Any) -> None:
    raw = RAW[family.name]
    try:
        changed = family.config(raw | {key: value})
    except CheckpointError as error:
        refused = str(error)
    else:
        # The windows of a base are open in an A2D model.
        assert changed != family.config(raw) or (family.name == "a2d" and key in ("use_sliding_window", "layer_types"))
        assert key not in SPELLINGS or value not in REFUSED
        return
    inner = value if isinstance(value, dict) else {}
    assert any(f"'{name}' is " in refused for name in (key, "rope_theta", "partial_rotary_factor", *inner))
    assert value not in SCALED or family.name in UNSCALED, "what transformers scales is read"


@EACH
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("scaled", SCALED, ids=str)
def test_positions_are_scaled_as_transformers_scales_them(
    family: Family, spelling: str, scaled: dict[str, Any]
) -> None:
    raw = RAW[family.name] | {spelling: scaled, "head_dim": RAW[family.name].get("head_dim", 4)}
    if family.name in UNSCALED:
        with pytest.raises(CheckpointError, match=r"type' is .*supported: \"default\": .* scales no positions"):
            family.config(raw)
        return
    config = family.config(raw)
    share = (config.rotary_dim or config.head_dim) / config.head_dim
    named = {"rope_type": scaled.get("type"), **scaled, "partial_rotary_factor": share}
    theirs = LlamaConfig(
        head_dim=config.head_dim,
        max_position_embeddings=raw["max_position_embeddings"],
        rope_parameters=named | {"rope_theta": raw["rope_theta"]},
    )
    inverse, gain = ROPE_INIT_FUNCTIONS[named["rope_type"]](theirs)
    torch.testing.assert_close(frequencies(config, CPU), inverse, rtol=1e-6, atol=0)
    turns = torch.outer(torch.arange(config.max_length).float(), inverse)
    for ours, expected in zip(rope(config, torch.float32, CPU), (turns.cos(), turns.sin()), strict=True):
        torch.testing.assert_close(ours[:, 0], expected * gain, rtol=0, atol=1e-4)
    if named["rope_type"] == "yarn":
        assert config.max_length == max(
            64, 4 * scaled.get("original_max_position_embeddings", 64 * scaled["factor"] / 4)
        )


def test_dynamic_scaling_begins_where_canvases_end() -> None:
    """Frequencies that depend on a batch's longest canvas fit no cache. Up to the model's length they are plain."""
    for family in PLAIN:
        raw = RAW[family.name] | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
        if family.name not in UNSCALED:
            assert family.config(raw) == family.config(RAW[family.name])


def test_what_is_said_twice_of_positions_is_said_alike() -> None:
    (family,) = (family for family in FAMILIES if family.name == "a2d")
    both = {SPELLINGS[0]: SCALED[2], SPELLINGS[1]: SCALED[2]}
    assert family.config(RAW["a2d"] | both) == family.config(RAW["a2d"] | {SPELLINGS[0]: SCALED[2]})
    for key, wrong in ((SPELLINGS[0], both | {SPELLINGS[1]: SCALED[0]}), (ORIGINAL, both | {ORIGINAL: 16})):
        with pytest.raises(CheckpointError, match=f"'{key}' is"):
            family.config(RAW["a2d"] | wrong)


@pytest.mark.parametrize("key", ["beta_fast", "beta_slow"])
@pytest.mark.parametrize("turns", [1e308, 1e-320])
def test_turns_without_a_finite_logarithm_are_refused(key: str, turns: float) -> None:
    (family,) = (family for family in FAMILIES if family.name == "a2d")
    extreme = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32, key: turns}
    with pytest.raises(CheckpointError, match=f"'{key}' is .*; supported: a number from 1e-100 to 1e\\+100"):
        family.config(RAW["a2d"] | {SPELLINGS[0]: extreme})


def test_a_factor_beyond_all_floats_ends_at_the_longest_canvas() -> None:
    (family,) = (family for family in FAMILIES if family.name == "a2d")
    long = {"rope_type": "yarn", "factor": 1e308, ORIGINAL: 32}
    assert family.config(RAW["a2d"] | {SPELLINGS[0]: long}).max_length == SIZE


@EACH
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_both_spellings_are_one_model(family: Family, spelling: str) -> None:
    raw = RAW[family.name]
    assert family.config(moved(raw, spelling)) == family.config(raw)
    assert family.config({**raw, **moved(raw, spelling)}) == family.config(raw), "in both places"
    unnamed = moved(raw, spelling)
    del unnamed[spelling]["rope_type"]
    assert family.config(unnamed) == family.config(raw), "transformers takes the default type where none is named"
    assert family.config(moved(raw, spelling, rope_theta=777.0)).rope_theta == 777.0
    assert family.config({**raw, spelling: {}}) == family.config({**raw, spelling: None}) == family.config(raw)


@EACH
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_two_places_that_differ_are_both_named(family: Family, spelling: str) -> None:
    raw = RAW[family.name] | {spelling: {"rope_type": "default", "rope_theta": 3.0}}
    with pytest.raises(
        CheckpointError, match=rf"{spelling}': 'rope_theta' is 3\.0; supported: the {raw['rope_theta']} "
    ):
        family.config(raw)


@EACH
def test_a_base_that_is_missing_everywhere_is_named(family: Family) -> None:
    raw = moved(RAW[family.name], "rope_parameters")
    del raw["rope_parameters"]["rope_theta"]
    with pytest.raises(CheckpointError, match=r"'rope_parameters': the key 'rope_theta' is missing"):
        family.config(raw)


@EACH
@pytest.mark.parametrize("spelling", [None, *SPELLINGS])
def test_the_share_of_turned_channels(family: Family, spelling: str | None) -> None:
    raw = {key: value for key, value in RAW[family.name].items() if key != "partial_rotary_factor"}

    def read(share: float | None, **more: Any) -> Any:
        inner = {} if share is None else {"partial_rotary_factor": share}
        return family.config(
            {**raw, **inner, **more} if spelling is None else {**moved(raw, spelling, **inner), **more}
        )

    whole = read(1.0)
    assert whole.rotary_dim is None
    if family.name not in PARTIAL:
        assert read(None) == whole
        with pytest.raises(CheckpointError, match=r"'partial_rotary_factor' is 0\.5; supported: 1 "):
            read(0.5)
        with pytest.raises(CheckpointError, match=r"'rotary_dim' is 2; supported: \d "):
            read(None, rotary_dim=2)
        return
    half = whole.head_dim // 2
    assert read(0.5).rotary_dim == half
    # Their classes' own values where the key is missing.
    assert read(None).rotary_dim == (half if family.name == "llada2" else None)
    assert read(0.5, rotary_dim=half) == read(0.5)
    for contradicting in (half + 2, 2 * half):
        with pytest.raises(CheckpointError, match=rf"'rotary_dim' is {contradicting}; supported: {half} "):
            read(0.5, rotary_dim=contradicting)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dream", Qwen2Config),
        ("fast-dllm-v2", Qwen2Config),
        ("sdar", Qwen3Config),
        ("sdar-moe", Qwen3MoeConfig),
        ("illada", LlamaConfig),
    ],
)
def test_what_transformers_saves_of_a_configuration_is_the_same_model(name: str, kind: Any, tmp_path: Path) -> None:
    """`save_pretrained` of the class that the family's own derives from moves and renames keys."""
    raw = RAW[name]
    own = {key: raw[key] for key in ("model_type", "architectures")}
    kind(**{key: value for key, value in raw.items() if key not in own}).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in saved
    (family,) = (family for family in FAMILIES if family.name == name)
    assert family.config(saved | own) == family.config(raw)
    theta = 777.0
    changed = kind(**{key: value for key, value in (raw | {"rope_theta": theta}).items() if key not in own})
    assert family.config(changed.to_dict() | own).rope_theta == changed.rope_parameters["rope_theta"] == theta


@pytest.mark.parametrize("name", ["llada-moe", "llada2", "sdar-moe"])
def test_experts_by_their_newer_name(name: str) -> None:
    (family,) = (family for family in FAMILIES if family.name == name)
    raw = RAW[name]
    without = {key: value for key, value in raw.items() if key != "num_experts"}
    assert family.config(without | {"num_local_experts": 6}) == family.config(raw)
    assert family.config(raw | {"num_local_experts": 6}) == family.config(raw)
    with pytest.raises(CheckpointError, match=r"'num_experts' is 6; supported: 3 "):
        family.config(raw | {"num_local_experts": 3})


def test_an_odd_head_is_refused_by_its_own_name() -> None:
    for name in ("sdar", "sdar-moe", "llada2"):
        (family,) = (family for family in FAMILIES if family.name == name)
        with pytest.raises(CheckpointError, match=r"'head_dim' is 7; supported: an even number"):
            family.config(RAW[name] | {"head_dim": 7})


def test_a_key_that_nobody_knows_is_refused_in_every_family(tmp_path: Path) -> None:
    """A folder that nearly fits is a newer model's: it is read once somebody says that the key changes nothing."""
    for family in FAMILIES:
        raw = RAW[family.name]
        nested = {"text_config": raw["text_config"] | {"new_router": "pool"}} if "text_config" in raw else {}
        for key, value in (("expert_windows", 48), ("new_router", "pool"), ("extra_norm", True), ("gates", [1])):
            write(tmp_path, raw | {key: value}, {})
            with pytest.raises(
                CheckpointError, match=f"{family.name}.* not known to have: '{key}' .*--force"
            ) as refused:
                read_config(tmp_path)
            assert f'{{"{key}": null}}' in str(refused.value)
            usual = read_config(write(tmp_path / "usual", raw, {}))[1]
            assert read_config(tmp_path, {key: None})[1] == read_config(tmp_path, force=True)[1] == usual
            # What is switched off, and what only training reads.
            write(tmp_path, raw | {key: None, "extra": False, "my_loss_weight": 0.5, "use_cache": True}, {})
            assert read_config(tmp_path)[1] == usual
        if nested:
            with pytest.raises(CheckpointError, match=r"'text_config\.new_router'"):
                read_config(write(tmp_path, raw | nested, {}))


def test_a_folder_of_llada22_is_never_read_as_an_older_one() -> None:
    (family,) = (family for family in FAMILIES if family.name == "llada2")
    newer = RAW["llada2"] | {"expert_capacity": 3, "block_size": 8, "delete_token_id": 30, "split_token_id": 31}
    config = family.config(newer)
    assert config.edit_tokens is not None
    assert config.mixture is not None
    router = config.mixture.router
    assert (router.pool, router.block, router.groups, router.kept_groups) == (3, 8, 1, 1)
    assert config.sampling.remasking == "levenshtein"
    for key, other in (("delete_token_id", "split_token_id"), ("split_token_id", "delete_token_id")):
        with pytest.raises(
            CheckpointError, match=rf"'{key}' is 3\d; supported: this key only together with 'expert_capacity'"
        ):
            family.config(newer | {"expert_capacity": 0, other: None})
        with pytest.raises(CheckpointError, match=f"the key '{key}' is missing"):
            family.config(newer | {key: None})
    for key, value in (("expert_capacity", 1), ("expert_capacity", 7), ("split_token_id", 30), ("split_token_id", 39)):
        with pytest.raises(CheckpointError, match=f"'{key}'|num_experts_per_tok"):
            family.config(newer | {key: value})
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.25}}
    assert (family.config(newer | both).rope_theta, family.config(newer | both).rotary_dim) == (777.0, 2)


@pytest.mark.parametrize("none", [-1, [-1]], ids=str)
@pytest.mark.parametrize("family", [each for each in PLAIN if each.name != "sumi"], ids=lambda family: family.name)
def test_minus_one_is_no_end_token(family: Family, none: Any, tmp_path: Path) -> None:
    raw = RAW[family.name] | {"eos_token_id": -1, "pad_token_id": -1}
    assert family.config(raw).stop_ids == ()
    (tmp_path / "config.json").write_text(json.dumps(raw | {"eos_token_id": 38}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": none}))
    assert read_config(tmp_path)[1].stop_ids == (38,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [37, -2]}')
    with pytest.raises(CheckpointError, match=r"'eos_token_id' is \[37, -2\]; supported: .* -1 for none"):
        read_config(tmp_path)


@pytest.mark.parametrize("top_k", [0, -1, 0.0, None])
def test_all_tokens_in_the_words_of_other_libraries(tmp_path: Path, top_k: object) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": top_k}))
    assert read_sampling(tmp_path) == {"temperature": 0.6}
    path.write_text(json.dumps({"do_sample": True, "top_k": -2}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_k must be a whole number .* got -2"):
        read_sampling(tmp_path)
