"""One system prompt before diverse prompts, as BiCache profiles."""

import random
from pathlib import Path

import pytest

from remask.depth.conversations import Conversation, RandomPrompts, SystemPrompt
from remask.depth.profile import Cuts, cut_at, reachable
from remask.depth.prompts import default_prompts, under_system_prompt
from remask.depth.rule import ProfileSettings
from remask.errors import ConfigError
from remask.policies.bicache import percent
from tests import goldens
from tests.depth.models import loaded, open_model, with_ascii_tokenizer

FOLDER = goldens.model_dir("llada")


def test_every_prefix_is_the_system_prompt_or_its_head() -> None:
    """By hand: 30 tokens on canvases of at most 60. At 75 % the canvas has 40; at 40 % the prefix is cut to 24."""
    first, last = Conversation(range(100), ends=(10, 44), system=30), range(200, 300)
    cuts = {ratio: cut_at(first, last, ratio, 60, 8) for ratio in (40, 50, 75)}
    assert {ratio: (cut.prefix, len(cut.prompt) + cut.masks) for ratio, cut in cuts.items()} == {
        40: (24, 60),
        50: (30, 60),
        75: (30, 40),
    }
    for cut in cuts.values():
        assert cut.prompt[: cut.prefix] == tuple(range(cut.prefix))
        assert cut.prompt[cut.prefix :] == tuple(range(300 - len(cut.prompt) + cut.prefix, 300))


@pytest.mark.parametrize("system", [9, 30, 59, 500])
def test_ratios_that_are_reached_are_exact(system: int) -> None:
    for ratio in reachable(None, 60, system):
        cut = cut_at(Conversation(range(600), system=system), range(600), ratio, 60, 8)
        total = len(cut.prompt) + cut.masks
        assert percent(cut.prefix, total) == ratio
        assert cut.prefix <= system
        assert cut.prefix < total <= 60
        assert total - cut.prefix >= 8


def test_ratios_that_cannot_be_reached() -> None:
    with pytest.raises(ConfigError, match=r"system prompt of 5 tokens .* of 97, 98 %; use a longer system prompt"):
        reachable([50, 97, 98], 60, 5)
    with pytest.raises(ConfigError, match="of any measured %"):
        reachable(None, 8, 5)


def test_requests_share_it_and_differ_behind_it(tmp_path: Path) -> None:
    model = loaded(str(with_ascii_tokenizer(FOLDER, tmp_path / "ascii")))
    (tmp_path / "system.txt").write_text("Answer with a number.\n", encoding="utf-8")
    prompts = under_system_prompt(tmp_path / "system.txt", default_prompts(model), model)
    assert isinstance(prompts, SystemPrompt)
    assert model.tokenizer is not None
    assert model.tokenizer.decode(prompts.tokens).strip().endswith("Answer with a number.")
    assert f"system.txt of {len(prompts.tokens)} tokens, then 200 questions of GSM8K" in prompts.source
    drawn = [prompts.draw(random.Random(seed), 200) for seed in range(2)]
    assert all(tuple(each.tokens[: each.system]) == prompts.tokens for each in drawn)
    assert drawn[0].tokens != drawn[1].tokens
    assert (prompts.canvas, prompts.response) == (prompts.prompts.canvas, prompts.prompts.response)


def test_a_system_prompt_that_cannot_be_read(tmp_path: Path) -> None:
    bare, file = loaded(str(FOLDER)), tmp_path / "system.txt"
    prompts = RandomPrompts(bare.config)
    with pytest.raises(ConfigError, match="cannot be read"):
        under_system_prompt(file, prompts, bare)
    file.write_text(" \n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no text"):
        under_system_prompt(file, prompts, bare)
    file.write_text("Be brief.", encoding="utf-8")
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        under_system_prompt(file, prompts, bare)


def test_its_store_entry_is_one_at_every_ratio_above_that_of_the_longest_canvas() -> None:
    llm = open_model(str(FOLDER))
    prompts = SystemPrompt(RandomPrompts(llm.model.config), tuple(range(20)), "made")
    cuts = Cuts(llm.session, prompts, ProfileSettings(canvas=40, response=4, ratios=(50, 80), samples=1))
    assert {cut.prompt[: cut.prefix] for number in range(3) for cut in cuts.cut(number)} == {tuple(range(20))}
