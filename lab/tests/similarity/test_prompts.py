import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from remask.checkpoint.loaded import LoadedModel
from remask.errors import ConfigError
from remask.policies.bicache import percent
from remask.tasks import relay
from remask.tasks.transit import RULES, make_workload
from remask_lab.similarity.conversations import (
    ChatPrompts,
    Conversation,
    RandomPrompts,
    SystemPrompt,
    TaskPrompts,
    TokenPrompts,
)
from remask_lab.similarity.profile import Cuts, cut_at, profile, reachable
from remask_lab.similarity.prompts import default_prompts, read_prompts, under_system_prompt
from remask_lab.similarity.rule import ProfileSettings
from tests import goldens
from tests.depth.models import loaded, open_model, with_ascii_tokenizer, with_transit_tokenizer, write_lines

LLADA = goldens.model_dir("llada")
USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def ascii_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded(str(with_ascii_tokenizer(LLADA, tmp_path_factory.mktemp("models") / "ascii")))


@pytest.fixture(scope="module")
def bare_model() -> LoadedModel:
    return loaded(str(LLADA))


def text(model: LoadedModel, tokens: Sequence[int]) -> str:
    assert model.tokenizer is not None
    return model.tokenizer.decode(tokens)


def _rows(conversation: str) -> int:
    return conversation.split("from")[0].count(">")


def test_the_default_is_gsm8k(ascii_model: LoadedModel) -> None:
    prompts = default_prompts(ascii_model)
    assert isinstance(prompts, ChatPrompts)
    assert "200 questions of GSM8K" in prompts.source
    drawn = prompts.draw(random.Random(0), 2000)
    assert len(drawn.tokens) >= 2000
    conversation = text(ascii_model, drawn.tokens)
    assert conversation.startswith("[user]")
    assert conversation.endswith("?\n[assistant]")
    assert conversation.count("[user]") == conversation.count("[assistant]") >= 3
    assert "<<" not in conversation
    assert len(drawn.ends) >= 2
    for end in drawn.ends:
        assert text(ascii_model, drawn.tokens[end:]).startswith("[user]"), "a user's turn comes next"
    assert prompts.draw(random.Random(0), 2000) == drawn
    assert prompts.draw(random.Random(1), 2000) != drawn


def test_the_bundled_vocabulary_gets_its_own_task(tmp_path: Path) -> None:
    folder = with_transit_tokenizer(LLADA, tmp_path / "transit")
    model = loaded(str(folder))
    prompts = default_prompts(model)
    assert isinstance(prompts, TaskPrompts)
    assert prompts.task == "transit"
    assert model.tokenizer is not None
    drawn = prompts.draw(random.Random(0), 400)
    conversation = text(model, drawn.tokens)
    assert drawn.ends[0] == model.tokenizer.shared_prefix(make_workload(1, 1, 0, _rows(conversation))[0].messages)
    assert RULES in conversation
    assert conversation.count("where am i") > 2
    assert conversation.count("##") == conversation.count("where am i") - 1
    table = profile(open_model(str(folder)).session, prompts, ProfileSettings(samples=1, ratios=(50, 88)))
    assert "transit" in table.source
    assert "canvases of up to 288 tokens, 16 masks" in table.source


def test_no_tokenizer_gets_random_tokens(bare_model: LoadedModel) -> None:
    prompts = default_prompts(bare_model)
    assert isinstance(prompts, RandomPrompts)
    drawn = prompts.draw(random.Random(0), 5000)
    assert len(drawn.tokens) == 5000
    assert drawn.ends == ()
    assert set(drawn.tokens) == set(range(256)) - {bare_model.config.mask_id}
    assert "no tokenizer" in prompts.source


def test_the_system_message_stands_first_and_roles_alternate(ascii_model: LoadedModel, tmp_path: Path) -> None:
    lines = [{"messages": [SYSTEM, USER, ANSWER]}, {"prompt": "One?"}, {"prompt": "Two?"}]
    prompts = read_prompts(write_lines(tmp_path / "p.jsonl", lines), ascii_model)
    for seed in range(8):
        conversation = text(ascii_model, prompts.draw(random.Random(seed), 120).tokens)
        roles = [line.split("]")[0][1:] for line in conversation.split("\n") if line.startswith("[")]
        assert "system" not in roles[1:]
        assert all(a != b for a, b in pairwise(roles))
        assert roles[-2:] == ["user", "assistant"]
        assert (roles[0] == "system") == conversation.endswith("Why?\n[assistant]")


def test_without_a_chat_template_the_texts_are_joined(tmp_path: Path) -> None:
    model = loaded(str(with_ascii_tokenizer(LLADA, tmp_path / "plain", None)))
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "One\u2028?"}\n', encoding="utf-8")  # only a line feed ends a line
    drawn = read_prompts(path, model).draw(random.Random(0), 20)
    assert text(model, drawn.tokens) == "\n\n".join(["One?"] * 5)
    assert drawn.ends == ()


def test_token_ids_need_no_tokenizer(bare_model: LoadedModel, tmp_path: Path) -> None:
    lines = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [7]}]
    prompts = read_prompts(write_lines(tmp_path / "p.jsonl", lines), bare_model)
    assert isinstance(prompts, TokenPrompts)
    drawn = prompts.draw(random.Random(0), 4)
    assert sorted(drawn.tokens) == [1, 2, 3, 7]
    assert drawn.ends == ((3, 4) if drawn.tokens[-1] == 7 else (1, 4))
    assert prompts.source == "2 prompts of p.jsonl"
    settings = ProfileSettings(samples=2, ratios=(50,), canvas=40)
    assert profile(open_model(str(LLADA)).session, prompts, settings).samples == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([1], "a line must be a JSON object, got list"),
        ({"promt": "x"}, "Unknown key 'promt'. Did you mean 'prompt'"),
        ({}, "exactly one of messages, prompt, prompt_token_ids, got none"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "exactly one of"),
        ({"prompt": "  "}, "not empty"),
        ({"prompt": 3}, "must be a text"),
        ({"prompt_token_ids": []}, "token ids from 0 to 255"),
        ({"prompt_token_ids": [256]}, "token ids from 0 to 255"),
        ({"prompt_token_ids": [True]}, "token ids from 0 to 255"),
        ({"messages": []}, "must hold a user's turn"),
        ({"messages": [ANSWER]}, "must hold a user's turn"),
        ({"messages": "Why?"}, "messages must be a list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages must be a list"),
    ],
)
def test_bad_lines_are_named(ascii_model: LoadedModel, tmp_path: Path, line: Any, message: str) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "One?"}, line])
    with pytest.raises(ConfigError, match=rf"line 2: .*{message}"):
        read_prompts(path, ascii_model)


def test_bad_files(ascii_model: LoadedModel, bare_model: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(path, ascii_model)
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_prompts(path, ascii_model)
    path.write_text('\n{"prompt": ')
    with pytest.raises(ConfigError, match="line 2: a line is not JSON"):
        read_prompts(path, ascii_model)
    write_lines(path, [{"prompt": "One?"}, {"prompt_token_ids": [1]}])
    with pytest.raises(ConfigError, match="both texts and token ids"):
        read_prompts(path, ascii_model)
    with pytest.raises(ConfigError, match="line 1: 'prompt' needs a tokenizer"):
        read_prompts(path, bare_model)


@pytest.mark.parametrize(
    ("name", "task", "rows", "asks", "tail", "opening"),
    [
        ("bundled-tariff", "tariff", 64, "who pays", 0.15, "Plan"),
        ("bundled", "relay", relay.RelaySettings().rows, "route from", 0.2, "In"),
    ],
)
def test_bundled_models_are_profiled_on_whole_requests(
    name: str, task: str, rows: int, asks: str, tail: float, opening: str
) -> None:
    model = loaded(name)
    prompts = default_prompts(model)
    assert isinstance(prompts, TaskPrompts)
    assert prompts.task == task
    tokens = prompts.draw(random.Random(0), prompts.canvas).tokens
    conversation = text(model, tokens)
    assert (conversation.count(asks), conversation.count(";")) == (1, rows - 1)
    # So much of a canvas holds the question, behind the prefix.
    assert opening in text(model, tokens[-(round(tail * prompts.canvas) - prompts.response) :])


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


def test_requests_share_it_and_differ_behind_it(ascii_model: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Answer with a number.\n", encoding="utf-8")
    prompts = under_system_prompt(tmp_path / "system.txt", default_prompts(ascii_model), ascii_model)
    assert isinstance(prompts, SystemPrompt)
    assert text(ascii_model, prompts.tokens).strip().endswith("Answer with a number.")
    assert f"system.txt of {len(prompts.tokens)} tokens, then 200 questions of GSM8K" in prompts.source
    drawn = [prompts.draw(random.Random(seed), 200) for seed in range(2)]
    assert all(tuple(each.tokens[: each.system]) == prompts.tokens for each in drawn)
    assert drawn[0].tokens != drawn[1].tokens
    assert (prompts.canvas, prompts.response) == (prompts.prompts.canvas, prompts.prompts.response)


def test_a_system_prompt_that_cannot_be_read(bare_model: LoadedModel, tmp_path: Path) -> None:
    file, prompts = tmp_path / "system.txt", RandomPrompts(bare_model.config)
    with pytest.raises(ConfigError, match="cannot be read"):
        under_system_prompt(file, prompts, bare_model)
    file.write_text(" \n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no text"):
        under_system_prompt(file, prompts, bare_model)
    file.write_text("Be brief.", encoding="utf-8")
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        under_system_prompt(file, prompts, bare_model)


def test_its_store_entry_is_one_at_every_ratio_above_that_of_the_longest_canvas() -> None:
    llm = open_model(str(LLADA))
    prompts = SystemPrompt(RandomPrompts(llm.model.config), tuple(range(20)), "made")
    cuts = Cuts(llm.session, prompts, ProfileSettings(canvas=40, response=4, ratios=(50, 80), samples=1))
    assert {cut.prompt[: cut.prefix] for number in range(3) for cut in cuts.cut(number)} == {tuple(range(20))}
