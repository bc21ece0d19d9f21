import numpy as np

from remask.core.canvas import Canvas

MASK = 9


def test_a_canvas_is_the_prompt_and_masks() -> None:
    canvas = Canvas([1, 2], 3, MASK)
    assert len(canvas) == 5
    assert canvas.prompt == 2
    assert canvas.tokens.tolist() == [1, 2, MASK, MASK, MASK]
    assert canvas.noisy.tolist() == [False, False, True, True, True]
    assert canvas.response.tolist() == [MASK] * 3


def test_a_typed_mask_token_is_not_noisy() -> None:
    canvas = Canvas([MASK, 1, MASK], 1, MASK)
    assert canvas.noisy.tolist() == [False, False, False, True]


def test_a_transferred_mask_token_is_final() -> None:
    canvas = Canvas([1], 2, MASK)
    canvas.transfer(np.array([1]), np.array([MASK]), 0)
    assert canvas.noisy.tolist() == [False, False, True]
    assert canvas.settled_lead == 1


def test_transfer_touches_the_given_positions_only() -> None:
    canvas = Canvas([1, 2], 4, MASK)
    canvas.transfer(np.array([3, 5]), np.array([7, 8]), 4)
    assert canvas.tokens.tolist() == [1, 2, MASK, 7, MASK, 8]
    assert canvas.noisy.tolist() == [False, False, True, False, True, False]


def test_settled_lead_stops_at_the_first_gap() -> None:
    canvas = Canvas([1, 2], 4, MASK)
    leads = [canvas.settled_lead]
    for position in (3, 2, 5, 4):
        canvas.transfer(np.array([position]), np.array([0]), 0)
        leads.append(canvas.settled_lead)
    assert leads == [0, 0, 2, 2, 4]


def test_without_prompt_or_response() -> None:
    assert Canvas([], 2, MASK).settled_lead == 0
    assert Canvas([1, 2], 0, MASK).settled_lead == 0
    assert len(Canvas((), 0, MASK)) == 0


def test_the_prompt_is_copied() -> None:
    prompt = np.array([1, 2, 3])
    canvas = Canvas(prompt.tolist(), 1, MASK)
    canvas.tokens[0] = 5
    assert prompt.tolist() == [1, 2, 3]
