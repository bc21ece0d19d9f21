"""The shapes of a model whose layers differ."""

import pickle
from dataclasses import asdict, fields, replace

import pytest

from remask.families import preset
from remask.model import config as module
from remask.model.config import ModelConfig, Sliding

MIXED = preset("diffusion-gemma-tiny")
DIFFERENT = pytest.mark.parametrize("name", ["diffusion-gemma-tiny", "diffusiongemma-26b-a4b", "modernbert-base-chat"])


@DIFFERENT
def test_shapes_are_computed_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = preset(name)
    found = config.shapes
    monkeypatch.setattr(module, "replace", lambda *_, **__: pytest.fail("a shape is computed again"))
    assert found[0] is config
    assert config.shapes[1] is found[1]
    assert all(config.shape_of(layer) is found[config.is_sliding(layer)] for layer in range(config.layers))
    assert {config.is_sliding(layer) for layer in range(config.layers)} == {True, False}


@DIFFERENT
def test_the_configuration_stays_the_same_value(name: str) -> None:
    """Whether its shapes were asked for or not."""
    asked = preset(name)
    before = repr(asked), asdict(asked), pickle.dumps(asked)
    fresh = replace(asked)
    assert len(asked.shapes) == 2
    assert before == (repr(asked), asdict(asked), pickle.dumps(asked))
    assert (asked, hash(asked)) == (fresh, hash(fresh))
    assert pickle.loads(pickle.dumps(asked)) == asked
    assert pickle.loads(pickle.dumps(asked)).shapes == asked.shapes


def test_a_changed_configuration_has_shapes_of_its_own() -> None:
    assert MIXED.sliding is not None
    assert MIXED.shapes[1].head_dim == MIXED.sliding.head_dim != 24
    changed = replace(MIXED, hidden=96, sliding=replace(MIXED.sliding, head_dim=24, rope_theta=5.0))
    own = changed.shapes[1]
    assert (own.hidden, own.head_dim, own.rope_theta) == (96, 24, 5.0)
    assert replace(changed, sliding=None).shapes == (replace(changed, sliding=None),)


def test_a_shape_differs_in_heads_and_rope_alone() -> None:
    own = MIXED.shapes[1]
    differing = {each.name for each in fields(ModelConfig) if getattr(own, each.name) != getattr(MIXED, each.name)}
    assert differing == {"kv_heads", "head_dim", "rope_theta", "rope_scaling", "tied_values"}
    plain = replace(MIXED, sliding=Sliding((0,), 3, 9.0))  # of the heads that others have
    assert (plain.shapes[1].kv_heads, plain.shapes[1].head_dim) == (MIXED.kv_heads, MIXED.head_dim)
