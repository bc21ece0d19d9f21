import pytest
import torch
import torch.nn.functional as F

from remask.engine.tracker import Tracker, attention_rows, drift
from tests.engine.support import CPU


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_rows_are_the_mean_over_heads(kv_heads: int) -> None:
    torch.manual_seed(kv_heads)
    q, k = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(5, kv_heads, 8, dtype=torch.float64)
    rows = attention_rows(q, k)
    assert rows.dtype == torch.float32
    # Attending to a unit matrix in place of values gives the probabilities.
    eye = torch.eye(5, dtype=torch.float64).expand(4, 5, 5)
    keys = k.repeat_interleave(4 // kv_heads, 1)
    expected = F.scaled_dot_product_attention(q.transpose(0, 1), keys.transpose(0, 1), eye).mean(0)
    torch.testing.assert_close(rows, expected.float())


def test_drift_is_one_minus_the_cosine() -> None:
    torch.manual_seed(0)
    old, new = torch.rand(2, 7)
    assert float(drift(old, new)) == pytest.approx(1 - float(F.cosine_similarity(old, new, dim=0)), abs=1e-6)
    assert float(drift(old, old.clone())) == 0
    assert float(drift(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))) == pytest.approx(1)


def test_small_drifts_are_not_rounded_away() -> None:
    old = torch.full((4,), 0.25)
    new = old + 1e-5 * torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert float(drift(old, new)) == pytest.approx(0.5 * (4e-5) ** 2, rel=0.02)


def test_nothing_is_tracked_before_the_first_pass() -> None:
    tracker = Tracker.of(4, 6, CPU)
    assert tracker.tokens.tolist() == [-1, -1, -1]
    assert tracker.rows.shape == (3, 6)
    assert Tracker.of(1, 6, CPU).rows.shape == (0, 6)
