"""What depth depends on, recomputed from dense float64 passes over the same canvases."""

import random
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from remask.errors import ConfigError
from remask.model.config import ModelConfig
from remask.tasks import tariff
from remask_lab.instruments.depths import task_prompts
from remask_lab.similarity.conversations import ChatPrompts, Conversation, RandomPrompts, TaskPrompts
from remask_lab.similarity.rule import ProfileSettings
from remask_lab.subjects.depth import QUESTIONS, DepthReport, measure_depths
from tests import goldens
from tests.depth.models import loaded, open_model, with_ascii_tokenizer, with_transit_tokenizer
from tests.oracles import similarity
from tests.oracles.dense import load

FOLDER = goldens.model_dir("llada")
TAU, CANVAS, MASKS, SAMPLES, HEADS = 0.9, 40, 4, 5, 3
SETTINGS = ProfileSettings(tau=TAU, ratios=(50, 80), samples=SAMPLES, canvas=CANVAS, response=MASKS)


@dataclass(frozen=True)
class Few:
    """Tokens from a part of the vocabulary, a canvas long, with a turn that ends at 16."""

    low: int
    high: int
    source: str = "a few tokens"
    canvas: int = 40
    response: int = 8

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Evenly."""
        return Conversation([rng.randrange(self.low, self.high) for _ in range(length)], (16,))


def conversation(prompts: Few, number: int) -> list[int]:
    return list(prompts.draw(random.Random(f"0:{number}"), CANVAS).tokens)


def dense_depth(head: list[int], tail: list[int], ratio: int, *, turn: bool) -> int:
    """Leading layers above TAU of one canvas, cut by hand."""
    prefix, total = {50: (16, 32) if turn else (20, 40), 80: (16, 20) if turn else (32, 40)}[ratio]
    model = load(FOLDER)
    suffix = total - prefix - min(MASKS, (total - prefix) // 2)
    masks = [model.mask_id] * (total - prefix - suffix)
    found = similarity.similarities(model, [*head[:prefix], *tail[len(tail) - suffix :], *masks], prefix)
    both = [(k + v) / 2 for k, v in zip(found["flat_cosine_k"], found["flat_cosine_v"], strict=True)]
    return sum(1 for _ in takewhile(lambda value: value > TAU, both))


@pytest.fixture(scope="module")
def report() -> DepthReport:
    tasks = {"low": Few(0, 100), "high": Few(100, 250)}
    return measure_depths(open_model(str(FOLDER)).session, tasks, SETTINGS, HEADS)


def test_depths_of_every_task_are_those_of_dense_passes(report: DepthReport) -> None:
    assert report.ratios == (50, 80)
    means = []
    for task, prompts in zip(report.tasks, (Few(0, 100), Few(100, 250)), strict=True):
        for ratio in report.ratios:
            drawn = [conversation(prompts, number) for number in range(SAMPLES)]
            depths = [dense_depth(tokens, tokens, ratio, turn=True) for tokens in drawn]
            assert task.mean[ratio] == pytest.approx(np.mean(depths))
            assert task.spread[ratio] == pytest.approx(np.std(depths))
        means.append(list(task.mean.values()))
    assert list(report.over_tasks.values()) == pytest.approx(np.std(means, axis=0).tolist())


def test_convergence_is_told_for_every_doubling(report: DepthReport) -> None:
    assert [step.samples for step in report.convergence] == [1, 2, 4, 5]
    assert np.isnan(report.convergence[0].distance)
    prompts = Few(0, 100)
    drawn = [conversation(prompts, number) for number in range(SAMPLES)]
    depths = np.array([[dense_depth(t, t, ratio, turn=True) for ratio in (50, 80)] for t in drawn])
    for before, after in zip(report.convergence, report.convergence[1:], strict=False):
        moved = np.abs(depths[: after.samples].mean(axis=0) - depths[: before.samples].mean(axis=0)).mean()
        assert after.distance == pytest.approx(moved)
        assert after.seconds > before.seconds


def test_variants_of_a_system_prompt_meet_the_same_questions(report: DepthReport) -> None:
    prompts = Few(0, 100)
    first, *others = [conversation(prompts, number) for number in range(HEADS)]
    heads = [first]
    for seed, other in enumerate(others, 1):
        places = [place for place in range(CANVAS) if first[place] != other[place]]
        taken = set(np.random.default_rng(seed).permutation(places)[: CANVAS // 2].tolist())
        heads.append([other[place] if place in taken else first[place] for place in range(CANVAS)])
        assert sum(a != b for a, b in zip(first, heads[-1], strict=True)) == CANVAS // 2
    questions = [conversation(prompts, HEADS + number) for number in range(QUESTIONS)]
    for ratio in (50, 80):
        means = [np.mean([dense_depth(head, q, ratio, turn=False) for q in questions]) for head in heads]
        assert report.system_prompts.spread[ratio] == pytest.approx(np.std(means))
    differing = np.mean([[a != b for a, b in zip(heads[0][:32], head[:32], strict=True)] for head in heads[1:]])
    assert report.system_prompts.changed == pytest.approx(differing)


def test_bad_measurements() -> None:
    llm = open_model(str(FOLDER))
    with pytest.raises(ConfigError, match="there is no task"):
        measure_depths(llm.session, {}, SETTINGS)
    with pytest.raises(ConfigError, match="at least 2 of them, got 1"):
        measure_depths(llm.session, {"low": Few(0, 100)}, SETTINGS, 1)
    with pytest.raises(ConfigError, match="cannot be cut"):
        measure_depths(llm.session, {"low": Few(0, 100)}, replace(SETTINGS, ratios=(51,)))


def test_tasks_by_what_the_tokenizer_reads(tmp_path: Path) -> None:
    bare = loaded(str(FOLDER))
    assert list(task_prompts(bare)) == ["random tokens"]
    assert isinstance(task_prompts(bare)["random tokens"], RandomPrompts)
    chats = task_prompts(loaded(str(with_ascii_tokenizer(FOLDER, tmp_path / "ascii"))))
    assert list(chats) == ["arithmetic", "random tokens"]
    assert isinstance(chats["arithmetic"], ChatPrompts)
    rides = task_prompts(loaded(str(with_transit_tokenizer(FOLDER, tmp_path / "transit"))))
    assert list(rides) == ["1 hop", "2 hops", "3 hops", "random tokens"]
    for hops in (1, 2, 3):
        prompts = rides["1 hop" if hops == 1 else f"{hops} hops"]
        assert isinstance(prompts, TaskPrompts)
        text = prompts.tokenizer.decode(prompts.draw(random.Random(0), 600).tokens)
        assert text.count(f"go {hops} ,") == text.count("where am i ?") > 1


def test_random_tokens_have_no_mask() -> None:
    config: ModelConfig = loaded(str(FOLDER)).config
    assert config.mask_id not in RandomPrompts(config).draw(random.Random(0), 2000).tokens


@pytest.mark.parametrize(
    ("name", "sets"),
    [("bundled-tariff", [*tariff.KINDS, "random tokens"]), ("bundled", ["relay", "random tokens"])],
)
def test_bundled_models_are_profiled_on_their_tasks(name: str, sets: list[str]) -> None:
    assert list(task_prompts(loaded(name))) == sets
