import torch

from remask_lab.instruments.depths import row_cosines, run_depth


def test_depth_is_a_run_of_leading_layers_strictly_above_tau() -> None:
    assert run_depth([1, 0.98, 0.97, 0.99], 0.97) == 2
    assert run_depth([0.9, 1.0], 0.97) == 0


def cosine(a: torch.Tensor, b: torch.Tensor, start: int) -> float:
    """The mean cosine over dimensions before `start`, all others flattened."""
    return float(torch.nn.functional.cosine_similarity(a.flatten(start), b.flatten(start), dim=-1).mean())


def test_the_cosine_below_which_a_share_of_the_rows_are() -> None:
    """Four rows, one of which turns by 90 degrees: the least cosine is 0, and half of the rows are at 1 or below."""
    here = torch.tensor([[1.0, 0], [1, 0], [1, 0], [1, 0]])[:, None]
    there = torch.tensor([[2.0, 0], [1, 0], [0, 1], [3, 0]])[:, None]
    found = [row_cosines(((here,), (here,)), ((there,), (here,)), share)[:, 0].tolist() for share in (0, 0.5)]
    assert found == [[0, 1], [1, 1]]
