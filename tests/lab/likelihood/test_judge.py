from pathlib import Path

import pytest

from remask.errors import ConfigError
from remask_lab.likelihood.perplexity import Judge
from tests.lab.likelihood.judges import nll_by_hand, save_judge


@pytest.mark.parametrize("begin", [True, False])
@pytest.mark.parametrize(("prompt", "response"), [("a town", " by the sea"), ("", "the sea"), ("häuser", "é")])
def test_scores_are_those_by_hand(tmp_path: Path, begin: bool, prompt: str, response: str) -> None:
    folder = save_judge(tmp_path / "judge", begin=begin)
    judge = Judge(str(folder), "float32")
    nll, tokens = judge.score(prompt, response)
    assert nll == pytest.approx(nll_by_hand(folder, prompt, response), abs=1e-3)
    unseen = not begin and not prompt  # nothing stands before the first token
    assert tokens == len(response.encode()) - unseen
    assert judge.dtype == "float32"


def test_long_responses_are_scored_in_parts(tmp_path: Path) -> None:
    folder = save_judge(tmp_path / "judge", positions=400)
    nll, tokens = Judge(str(folder)).score("", "sea " * 80)
    assert tokens == 320
    assert nll == pytest.approx(nll_by_hand(folder, "", "sea " * 80), rel=1e-4)


def test_an_empty_response_has_no_score(tmp_path: Path) -> None:
    assert Judge(str(save_judge(tmp_path / "judge"))).score("a", "") == (0.0, 0)


def test_what_a_judge_cannot_read(tmp_path: Path) -> None:
    folder = save_judge(tmp_path / "judge", positions=8)
    with pytest.raises(ConfigError, match=r"have 9 tokens of the judge .*, which reads 8; use shorter"):
        Judge(str(folder)).score("abcd", "efgh")
