"""The ablation of dKV-Cache's delay, against what the paper says of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.errors import ConfigError
from remask.plan.plan import View
from remask.policies.base import RequestFacts
from remask.policies.dkv import DkvDecode
from remask_lab.bench.grid import UndelayedDecode
from tests.policies.views import layer_rows, views


@given(views(prefix=False), st.sampled_from([None, 1, 3, 8]))
def test_rows_are_those_that_are_noisy(view: View, interval: int | None) -> None:
    plan = UndelayedDecode(interval).plan(view)
    full = view.block_step == 0 or (interval is not None and view.block_step % interval == 0)
    expected = np.ones_like(view.noisy) if full else view.noisy
    assert all(layer_rows(plan, layer)[0] == expected.tolist() for layer in range(view.layers))
    assert plan.predict.tolist() == view.candidates.tolist()
    delayed = DkvDecode(interval).plan(view)
    assert plan.cost <= delayed.cost


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="not Dream"):
        UndelayedDecode().check(RequestFacts(2, 1, False, 8, 4))
    UndelayedDecode().check(RequestFacts(2, 0, False, 8, 4))
    with pytest.raises(ConfigError, match="refresh_interval"):
        UndelayedDecode(0)
