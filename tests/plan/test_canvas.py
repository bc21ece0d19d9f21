import numpy as np

from remask.plan.canvas import Canvas

MASK = 9


def transfer(canvas: Canvas, positions: list[int], tokens: list[int], step: int = 0) -> None:
    canvas.write(np.array(positions), np.array(tokens))
    canvas.settle(np.array(positions), step)


def test_a_canvas_is_the_prompt_and_masks() -> None:
    canvas = Canvas.masked([1, 2], 3, MASK)
    assert len(canvas) == 5
    assert canvas.prompt == 2
    assert canvas.tokens.tolist() == [1, 2, MASK, MASK, MASK]
    assert canvas.noisy.tolist() == [False, False, True, True, True]
    assert canvas.response.tolist() == [MASK] * 3


def test_a_typed_mask_token_is_not_noisy() -> None:
    canvas = Canvas.masked([MASK, 1, MASK], 1, MASK)
    assert canvas.noisy.tolist() == [False, False, False, True]


def test_a_transferred_mask_token_is_final() -> None:
    canvas = Canvas.masked([1], 2, MASK)
    transfer(canvas, [1], [MASK])
    assert canvas.noisy.tolist() == [False, False, True]
    assert canvas.settled_lead == 1


def test_transfer_touches_the_given_positions_only() -> None:
    canvas = Canvas.masked([1, 2], 4, MASK)
    transfer(canvas, [3, 5], [7, 8], 4)
    assert canvas.tokens.tolist() == [1, 2, MASK, 7, MASK, 8]
    assert canvas.noisy.tolist() == [False, False, True, False, True, False]


def test_settled_lead_stops_at_the_first_gap() -> None:
    canvas = Canvas.masked([1, 2], 4, MASK)
    leads = [canvas.settled_lead]
    for position in (3, 2, 5, 4):
        transfer(canvas, [position], [0])
        leads.append(canvas.settled_lead)
    assert leads == [0, 0, 2, 2, 4]


def test_without_prompt_or_response() -> None:
    assert Canvas.masked([], 2, MASK).settled_lead == 0
    assert Canvas.masked([1, 2], 0, MASK).settled_lead == 0
    assert len(Canvas((), (), 0)) == 0


def test_the_prompt_is_copied() -> None:
    prompt = np.array([1, 2, 3])
    canvas = Canvas.masked(prompt.tolist(), 1, MASK)
    canvas.tokens[0] = 5
    assert prompt.tolist() == [1, 2, 3]


def test_what_is_written_stays_noisy_until_it_is_settled() -> None:
    canvas = Canvas([1], [4, 5, 6], 2)
    canvas.write(np.array([1, 3]), np.array([7, 8]))
    assert canvas.tokens.tolist() == [1, 7, 5, 8]
    assert canvas.noisy.tolist() == [False, True, True, True]
    canvas.settle(np.array([1, 2]), 3)
    canvas.settle(np.array([2, 3]), 5)
    assert canvas.settled.tolist() == [-1, 3, 3, 5]


def test_what_stands_after_the_response_is_not_of_it() -> None:
    canvas = Canvas([1], [4, 5, 6], 2)
    assert canvas.response.tolist() == [4, 5]
    canvas.settle(np.array([1, 2]), 0)
    assert canvas.settled_lead == 2
