import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remask.model.row_attention import attention_rows
from remask.policies.on_device import Tracker, drift


def logs(*heads: list[float]) -> Tensor:
    """Logarithms of the attention of one token, by head."""
    return torch.tensor(heads)[:, None].log()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_rows_are_attention_by_head(kv_heads: int) -> None:
    torch.manual_seed(kv_heads)
    q, k = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(5, kv_heads, 8, dtype=torch.float64)
    rows = attention_rows(q, k)
    assert rows.dtype == torch.float32
    # Attending to a unit matrix in place of values gives the probabilities.
    eye = torch.eye(5, dtype=torch.float64).expand(4, 5, 5)
    keys = k.repeat_interleave(4 // kv_heads, 1)
    expected = F.scaled_dot_product_attention(q.transpose(0, 1), keys.transpose(0, 1), eye)
    torch.testing.assert_close(rows.exp(), expected.float())


def test_heads_are_compared_at_each_key_however_little_it_weighs() -> None:
    """By hand: two heads, two keys. At the first key (.6, .3) becomes (.3, .6), at the second (.4, .7) too turns."""
    old, new = logs([0.6, 0.4], [0.3, 0.7]), logs([0.3, 0.7], [0.6, 0.4])
    second = 2 * 0.4 * 0.7 / (0.4**2 + 0.7**2)
    assert float(drift(old, new, "heads")) == pytest.approx(1 - (0.8 + second) / 2, abs=1e-6)
    # Half of the keys turn around, and weigh next to nothing.
    tiny = 1e-30
    old, new = logs([1.0, tiny], [1.0, 2 * tiny]), logs([1.0, 2 * tiny], [1.0, tiny])
    assert float(drift(old, new, "heads")) == pytest.approx((1 - 0.8) / 2, abs=1e-6)
    assert float(drift(old, new, "keys")) == 0


def test_keys_are_compared_of_the_mean_over_heads() -> None:
    """By hand: the heads change places, so their mean stays; then (.5, .5) becomes (.8, .2)."""
    old, new = logs([0.6, 0.4], [0.3, 0.7]), logs([0.3, 0.7], [0.6, 0.4])
    assert float(drift(old, new, "keys")) == pytest.approx(0, abs=1e-7)
    old, new = logs([0.6, 0.4], [0.4, 0.6]), logs([0.9, 0.1], [0.7, 0.3])
    assert float(drift(old, new, "keys")) == pytest.approx(1 - 0.5 / (0.5**0.5 * 0.68**0.5), abs=1e-6)


@pytest.mark.parametrize("similarity", ["heads", "keys"])
def test_tokens_count_alike(similarity: str) -> None:
    torch.manual_seed(0)
    old, new = torch.randn(2, 4, 3, 7).log_softmax(-1)
    one_by_one = torch.stack([drift(old[:, [i]], new[:, [i]], similarity) for i in range(3)])  # type: ignore[arg-type]
    torch.testing.assert_close(drift(old, new, similarity), one_by_one.mean())  # type: ignore[arg-type]
    assert float(drift(old, old.clone(), similarity)) == 0  # type: ignore[arg-type]


def test_small_drifts_are_not_rounded_away() -> None:
    old = torch.full((1, 1, 4), 0.25)
    new = old + 1e-5 * torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert float(drift(old.log(), new.log(), "keys")) == pytest.approx(0.5 * (4e-5) ** 2, rel=0.02)


def test_what_a_pass_found_is_forgotten_when_it_is_done() -> None:
    tracker = Tracker()
    assert tracker.tokens.tolist() == []
    tracker = Tracker(moved={0: 0.5}, reference=(0, torch.zeros(1)))
    tracker.done(np.array([7, 3, 7, 0]))
    assert (tracker.tokens.tolist(), len(tracker.moved)) == ([0, 3, 7], 0)
    assert tracker.reference is None
