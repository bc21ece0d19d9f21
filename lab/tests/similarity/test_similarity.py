import numpy as np
import pytest
import torch

from remask.errors import ConfigError
from remask_lab.similarity.probe import PrefixProbe, flat_cosine, joint_cosine, token_cosine
from tests import goldens
from tests.depth.models import loaded, transformer

PAIRS = goldens.profiler()["pairs"]


@pytest.fixture(scope="module")
def probe() -> PrefixProbe:
    return PrefixProbe(transformer(loaded(str(goldens.model_dir("llada")))), 512)


@pytest.mark.parametrize("name", PAIRS)
def test_golden_similarities(probe: PrefixProbe, name: str) -> None:
    expected = PAIRS[name]
    prompt, prefix = goldens.prompts()[name], expected["prefix_len"]
    official = probe.similarity(prompt, 0, prefix, "official")
    flat = probe.similarity(prompt, 0, prefix)
    joint = probe.similarity(prompt, 0, prefix, "joint")
    for ours, key in (
        (official[0], "mean_token_cosine_k"),
        (official[1], "mean_token_cosine_v"),
        (official.mean(axis=0), "official_mean_token_cosine"),
        (flat[0], "flat_cosine_k"),
        (flat[1], "flat_cosine_v"),
        (joint[0], "flat_cosine_concat_kv"),
        (joint[1], "flat_cosine_concat_kv"),
    ):
        np.testing.assert_allclose(ours, expected[key], atol=1e-4)


def test_masks_change_all_layers_but_the_first(probe: PrefixProbe) -> None:
    prompt = goldens.prompts()["s0a"]
    bare, masked = probe.similarity(prompt, 0, 25), probe.similarity(prompt, 16, 25)
    np.testing.assert_allclose(masked[:, 0], 1, atol=1e-6)
    assert (np.abs(bare - masked)[:, 1:] > 1e-3).all()


def test_a_canvas_that_is_all_prefix_is_like_itself(probe: PrefixProbe) -> None:
    prompt = goldens.prompts()["s0a"]
    for measure in ("flat", "joint", "official"):
        np.testing.assert_allclose(probe.similarity(prompt, 0, len(prompt), measure), 1, atol=1e-6)


def test_memory_of_a_longer_canvas_does_not_leak_into_a_shorter_one(probe: PrefixProbe) -> None:
    prompt = goldens.prompts()["s0a"]
    fresh = PrefixProbe(probe.model, 64).similarity(prompt, 8, 20)
    probe.similarity(list(range(200)), 100, 150)
    np.testing.assert_allclose(probe.similarity(prompt, 8, 20), fresh, atol=1e-6)


def test_large_flat_cosines_keep_their_digits() -> None:
    torch.manual_seed(0)
    a = torch.randn(600, 16, 128)
    b = a + 0.2 * torch.randn_like(a)
    x, y = a.double().flatten(), b.double().flatten()
    exact = float(torch.dot(x, y) / (x.norm() * y.norm()))
    assert float(flat_cosine(a, b)) == pytest.approx(exact, abs=1e-6)
    assert float(flat_cosine(a, a)) == pytest.approx(1, abs=1e-6)


def test_the_two_measures_differ_where_tokens_differ_in_length() -> None:
    a = torch.tensor([[[10.0, 0.0]], [[1.0, 0.0]]])
    b = torch.tensor([[[10.0, 0.0]], [[0.0, 1.0]]])
    assert float(token_cosine(a, b)) == pytest.approx(0.5)
    assert float(flat_cosine(a, b)) == pytest.approx(100 / 101)


def test_one_vector_of_k_and_v_weighs_them_by_their_length() -> None:
    k, v = torch.tensor([[[4.0, 0.0]]]), torch.tensor([[[1.0, 0.0]]])
    turned = torch.tensor([[[0.0, 1.0]]])
    assert float(joint_cosine((k, k), (v, turned))) == pytest.approx(16 / 17)
    assert (float(flat_cosine(k, k)) + float(flat_cosine(v, turned))) / 2 == pytest.approx(1 / 2)


@pytest.mark.parametrize(("prefix", "response"), [(0, 0), (35, 0), (4, 500)])
def test_refuses_what_is_no_prefix_or_too_long(probe: PrefixProbe, prefix: int, response: int) -> None:
    with pytest.raises(ConfigError, match=r"prefix|canvas"):
        probe.similarity(list(range(34)), response, prefix)
