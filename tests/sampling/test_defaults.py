"""A request's sampling over the server's defaults: which of them give way."""

from typing import Any

import pytest

from remask import LLM
from remask.errors import ConfigError
from remask.plan.canvas import OPEN, Hole, Template
from remask.sampling.defaults import fit_defaults, overlay_defaults

DEFAULTS = {"max_tokens": 32, "block_length": 8, "steps": 16, "threshold": 0.9, "temperature": 0.5}


def fitted(own: dict[str, Any], defaults: dict[str, Any] = DEFAULTS, room: int = 1000) -> dict[str, Any]:
    """What is set, other than to its declared default."""
    return fit_defaults(defaults, own, room).non_defaults()


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, DEFAULTS),
        ({"temperature": 1.0}, {**DEFAULTS, "temperature": 1.0}),
        ({"max_tokens": 12}, {**DEFAULTS, "max_tokens": 12, "block_length": 6, "steps": 6}),
        # Fields of one choice are ways to make it: the request's own replaces the server's.
        (
            {"remasking": {"factor": 1.0}},
            {"remasking": {"factor": 1.0}, "max_tokens": 32, "block_length": 8, "steps": 16, "temperature": 0.5},
        ),
        ({"remasking": "random"}, {"remasking": "random", **{k: v for k, v in DEFAULTS.items() if k != "threshold"}}),
        ({"steps": 8}, {"steps": 8, **{k: v for k, v in DEFAULTS.items() if k not in ("steps", "threshold")}}),
        ({"steps_per_block": 2}, {"steps_per_block": 2, **{k: v for k, v in DEFAULTS.items() if k != "steps"}}),
    ],
    ids=repr,
)
def test_what_a_request_sets_stands(own: dict[str, Any], expected: dict[str, Any]) -> None:
    assert fitted(own) == expected


@pytest.mark.parametrize("own", [{"steps": 8}, {"remasking": "entropy_bounded"}], ids=repr)
def test_a_default_fallback_gives_way_with_the_threshold(own: dict[str, Any]) -> None:
    defaults = {"threshold": 0.5, "remasking": {"fallback": "leftmost"}}
    assert fitted({}, defaults) == defaults
    assert fitted({"threshold": 0.7}, defaults) == {"threshold": 0.7, "remasking": {"fallback": "leftmost"}}
    params = fit_defaults(defaults, own, 1000)
    assert params.remasking.fallback is None
    asked = {**own, "remasking": {"fallback": "leftmost"}}
    assert fit_defaults(defaults, asked, 1000).remasking.fallback == "leftmost", "what a request sets stands"


def test_a_default_length_gives_way_to_the_room() -> None:
    assert fitted({}, {"max_tokens": 32, "block_length": 8}, room=20) == {"max_tokens": 16, "block_length": 8}


@pytest.mark.parametrize("by_family", [False, True])
def test_the_last_block_of_a_growing_canvas_may_be_shorter(by_family: bool) -> None:
    own = {"max_tokens": 13} if by_family else {"max_tokens": 13, "blocks": {"growing_canvas": True}}
    params = fit_defaults(DEFAULTS, own, 1000, growing=by_family)
    assert (params.max_tokens, params.block_length, params.steps) == (13, 8, 6)
    fixed = fit_defaults(DEFAULTS, {"max_tokens": 14, "blocks": {"growing_canvas": False}}, 1000, growing=by_family)
    assert (fixed.block_length, fixed.steps) == (7, 8)
    odd = {"max_tokens": 13, "block_length": 8, "steps": 6, "blocks": {"growing_canvas": True}}
    assert fit_defaults(odd, {"max_tokens": 26}, 1000).steps == 10  # 3 of the 6 steps are those of 8 tokens
    del odd["blocks"]
    assert fit_defaults(odd, {"max_tokens": 26}, 1000, growing=True).steps == 10
    assert overlay_defaults(odd, {"max_tokens": 26}, growing=True)["steps"] == 10


def test_a_default_block_stays_where_responses_need_not_be_whole_blocks() -> None:
    """A block-causal model was trained with its block, and of a uniform one the last block reaches over the end."""
    usual = {"max_tokens": 32, "block_length": 8}
    for own in ({"max_tokens": 13}, {"max_tokens": 5}):
        assert fit_defaults(usual, own, 1000, whole=False).block_length == 8
        assert overlay_defaults(usual, own, whole=False)["block_length"] == 8


def test_the_last_of_ragged_blocks_may_be_shorter() -> None:
    """So a prime length keeps its block, and each block the usual steps; where all are whole it would be 1."""
    usual = {"max_tokens": 36, "block_length": 16, "steps": 24}  # 8 steps a block, of which there are three
    for length, steps in ((101, 7 * 8), (16, 8), (5, 8)):
        params = fit_defaults(usual, {"max_tokens": length}, 1000, ragged=True)
        assert (params.block_length, params.steps) == (16, steps)
        assert overlay_defaults(usual, {"max_tokens": length}, ragged=True)["block_length"] == 16
    assert fit_defaults(usual, {}, 20, ragged=True).max_tokens == 20
    assert fit_defaults({"max_tokens": 32, "block_length": 16}, {"max_tokens": 101}, 1000).block_length == 1
    llm = LLM("a2d-tiny", load_format="dummy", device="cpu", dtype="float32", threads=1)
    assert llm.session.params({"max_tokens": 101}, {"block_length": 16}).block_length == 16
    (output,) = llm.generate([[1, 2, 3]], llm.session.params({"max_tokens": 13, "ignore_eos": True}, usual))
    assert len(output.token_ids) == 13


@pytest.mark.parametrize(
    ("defaults", "own", "expected"),
    [
        ({"draft_window": 16}, {"max_draft_window": 4}, {"draft_window": 4, "max_draft_window": 4}),
        ({"max_draft_window": 4}, {"draft_window": 9}, {"draft_window": 9, "max_draft_window": 9}),
        ({"draft_window": 2}, {"max_draft_window": 4}, {"draft_window": 2, "max_draft_window": 4}),
    ],
)
def test_a_default_of_a_range_gives_way_to_its_other_end(
    defaults: dict[str, int], own: dict[str, int], expected: dict[str, int]
) -> None:
    found = fit_defaults({"speculation": defaults}, {"speculation": own, "mode": "linear_speculation"}, 100, modes=True)
    assert {name: getattr(found.speculation, name) for name in expected} == expected


def test_other_defaults_give_way_too() -> None:
    cooled = fit_defaults({"renoising": {"t_min": 0.4}}, {"renoising": {"t_max": 0.2}}, 100)
    assert (cooled.renoising.t_min, cooled.renoising.t_max) == (0.2, 0.2)
    part = {"blocks": {"sub_block_length": 8}}
    assert fit_defaults(part, {"block_length": 12}, 100, whole=False).blocks.sub_block_length == 6
    both = {"speculation": {"draft_window": 9, "max_draft_window": 4}}
    assert fit_defaults({}, both, 100).speculation.draft_window == 9, "what a request sets is taken as it is"


def test_a_default_growing_canvas_gives_way_to_a_template() -> None:
    template, defaults = Template((7, OPEN), (Hole(1, 2),)), {"blocks": {"growing_canvas": True}}
    assert fit_defaults(defaults, {"max_tokens": 2}, 1000, template, growing=True).blocks.growing_canvas is None
    assert (
        fit_defaults(
            defaults, {"max_tokens": 2, "blocks": {"growing_canvas": True}}, 1000, template
        ).blocks.growing_canvas
        is True
    )


def test_null_leaves_a_field_out() -> None:
    assert fitted({"max_tokens": None, "threshold": None}) == DEFAULTS
    assert overlay_defaults({"max_tokens": 8, "steps": None}, {"max_tokens": None, "steps": 4}) == {
        "max_tokens": 8,
        "steps": 4,
    }


@pytest.mark.parametrize("bad", [{"max_tokens": "8"}, {"max_tokens": [1]}, {"block_length": 2.5}, {"max_tokns": 8}])
def test_values_of_another_kind_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        fit_defaults(DEFAULTS, bad, 1000)


def test_a_requests_own_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"threshold and remasking\.factor are two rules"):
        fit_defaults(DEFAULTS, {"threshold": 0.5, "remasking": {"factor": 1.0}}, 1000)
