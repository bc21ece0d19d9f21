"""What has left is refused with what to use in its place, at every door that took it."""

import pytest

from remask.errors import LAST_FULL, LEFT, UnknownNameError
from remask.request.sampling_params import SamplingParams


@pytest.mark.parametrize("name", ["speculate"])
def test_a_sampling_parameter_that_left_says_what_to_use(name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        SamplingParams.from_mapping({name: 2})
    assert str(caught.value) == f"The sampling parameter {name!r} left after {LAST_FULL}: {LEFT[name]}."


def test_another_name_is_merely_unknown() -> None:
    with pytest.raises(UnknownNameError, match="Unknown sampling parameter 'speculates'"):
        SamplingParams.from_mapping({"speculates": 2})
