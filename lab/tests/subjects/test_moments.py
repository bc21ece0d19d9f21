import math

import numpy as np
import pytest

from remask_lab.instruments.series import Moments, off_diagonal_mean


def test_correlations_are_numpys(rng: np.random.Generator) -> None:
    k, v = rng.random((3, 50)), rng.random((3, 50))
    k[1] += 2 * k[0]
    v += k
    first, second = Moments(3), Moments(3)
    first.add(k[:, :20], v[:, :20])
    second.add(k[:, 20:], v[:, 20:])
    first.merge(second)
    assert (first.samples, second.samples) == (50, 30)
    for found, values in zip(first.layer_correlations(), (k, v), strict=True):
        np.testing.assert_allclose(found, np.corrcoef(values))
    assert first.kv_correlation() == pytest.approx(np.corrcoef(k.ravel(), v.ravel())[0, 1])


def test_nothing_correlates_with_what_never_varies() -> None:
    moments = Moments(2)
    assert math.isnan(moments.kv_correlation())
    assert np.isnan(moments.layer_correlations()[0]).all()
    moments.add(np.array([[0.1, 0.1], [0.0, 1.0]]), np.zeros((2, 2)))
    k, v = moments.layer_correlations()
    assert np.isnan(k[0]).all()
    assert k[1, 1] == 1
    assert np.isnan(v).all()
    assert math.isnan(moments.kv_correlation())


def test_mean_off_the_diagonal() -> None:
    assert off_diagonal_mean(np.array([[1.0, 0.5], [0.1, 1.0]])) == pytest.approx(0.3)
    assert math.isnan(off_diagonal_mean(np.ones((1, 1))))
