"""The recipe that makes a diffusion model of a causal one, on random bases of two layers."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from training.adapt import ask_base, train
from training.adapt import export as exporting
from training.adapt.base import load_base, load_tokenizer, look_both_ways, seat_mask
from training.adapt.block_canvases import BlockCanvas, draw_canvas, noise, stack_blocks
from training.adapt.canvases import Canvases, stack
from training.adapt.corpus import PIECES, TOWN_QUESTIONS, pieces, untested_questions
from training.adapt.export import export
from training.adapt.low_rank import add_low_rank, load_adapter, low_rank_modules, save_adapter
from training.adapt.questions import questions
from training.adapt.ragged import Ragged, load_ragged, save_ragged
from training.adapt.reuse import measure_reuse
from training.adapt.write import circles, write_conversations
from transformers import (
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from remask import LLM
from remask.checkpoint.files import tokenizer_mask
from remask.errors import CheckpointError
from remask.plan.canvas import Canvas
from remask.request.sampling_params import SamplingParams
from remask.sampling.block_causal import BlockCausalDecoding
from remask_lab.bench.documents import read_documents
from remask_lab.likelihood.passes import Job, UncachedPasses
from remask_lab.thresholds.measure import open_questions

VOCAB, CPU = 64, torch.device("cpu")
MASK, END = 5, 2
IDS = list(range(8, VOCAB - 4))
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
LLAMA: tuple[Any, Any] = (LlamaConfig, LlamaForCausalLM)
QWEN2: tuple[Any, Any] = (Qwen2Config, Qwen2ForCausalLM)
QWEN3: tuple[Any, Any] = (Qwen3Config, Qwen3ForCausalLM)
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "tie_word_embeddings": False}


def save_base(folder: Path, kind: tuple[Any, Any] = LLAMA, **changed: Any) -> Path:
    torch.manual_seed(0)
    kind[1](kind[0](**SHAPE | changed)).save_pretrained(folder)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A random Llama."""
    return save_base(tmp_path / "base")


@pytest.fixture
def corpus() -> dict[str, Ragged]:
    """Texts that count, so that a next token can be learned."""
    rng = np.random.default_rng(0)

    def text(size: int) -> list[int]:
        start = int(rng.integers(len(IDS)))
        return [IDS[(start + place) % len(IDS)] for place in range(size)]

    around = [[1, 8], [END, 1, 9], [END, 1, 10], [1, 9], [11], [1, 8, END, 1, 9], [9], [MASK], [END]]
    assert len(around) == len(PIECES)
    towns = [text(size) for _ in range(4) for size in (40, *([6, 5] * TOWN_QUESTIONS))]
    named = {name: Ragged.of(text(60) for _ in range(12)) for name in ("plain", "solved", "plain_held", "solved_held")}
    named |= {name: Ragged.of(text(600) for _ in range(6)) for name in ("documents", "documents_held")}
    named |= {name: Ragged.of(towns) for name in ("towns", "towns_held")}
    return named | {"asked": Ragged.of([text(5), text(7)]), "pieces": Ragged.of(around)}


def conversations() -> Ragged:
    return Ragged.of([[20, 21, 22], [30, 31, 32, END]] * 60)


def adapted(base: Path, rank: int = 4) -> Any:
    """The base with an adapter that changes something, looking both ways."""
    model = load_base(str(base), CPU)
    look_both_ways(model)
    add_low_rank(model, rank, 2.0 * rank)
    torch.manual_seed(1)
    with torch.no_grad():
        for module in low_rank_modules(model).values():
            module.b.normal_(std=0.2)
    return model


@torch.no_grad()
def logits(model: Any, ids: list[int]) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return found


def test_attention_looks_both_ways_until_it_does_not(base: Path) -> None:
    model = load_base(str(base), CPU)
    first = [logits(model, [9, 10, last])[0] for last in (11, 12)]
    assert torch.equal(*first)
    look_both_ways(model)
    first = [logits(model, [9, 10, last])[0] for last in (11, 12)]
    assert (first[0] - first[1]).abs().max() > 1e-4
    look_both_ways(model, both=False)
    assert torch.equal(*[logits(model, [9, 10, last])[0] for last in (11, 12)])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # which PEFT reads
def test_peft_reads_the_adapter(base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = adapted(base)
    save_adapter(model, tmp_path / "adapter", 8.0, str(base))
    other = load_base(str(base), CPU)
    wrapped = peft.PeftModel.from_pretrained(other, tmp_path / "adapter")
    look_both_ways(wrapped)
    torch.testing.assert_close(logits(wrapped, IDS[:9]), logits(model, IDS[:9]), atol=2e-3, rtol=1e-3)
    again = load_base(str(base), CPU)
    look_both_ways(again)
    add_low_rank(again, 4, 8.0)
    load_adapter(again, tmp_path / "adapter")
    torch.testing.assert_close(logits(again, IDS[:9]), logits(wrapped, IDS[:9]), atol=1e-5, rtol=1e-5)


def test_the_engine_computes_what_was_trained(base: Path, tmp_path: Path) -> None:
    """Merged by the recipe, and merged by the engine from the adapter's folder."""
    model = adapted(base)
    save_adapter(model, tmp_path / "adapter", 8.0, str(base))
    overrides = {"model_type": "a2d-llama", "mask_token_id": MASK, "right_shift_logits": True}
    (tmp_path / "adapter" / "remask.json").write_text(json.dumps({"hf_overrides": overrides}))
    prompt, response = IDS[:5], 6
    wanted = logits(model, [*prompt, *[MASK] * response])[len(prompt) - 1 : -1]
    export(model, tmp_path / "merged", MASK, END)
    for folder, tolerance in ((tmp_path / "merged", 1e-5), (tmp_path / "adapter", 2e-3)):
        llm = LLM(str(folder), dtype="float32", device="cpu", quantization="none")
        assert (llm.loaded.config.family, llm.loaded.config.stop_ids) == ("a2d", (END,))
        torch.testing.assert_close(answered(llm, prompt, response), wanted, atol=tolerance, rtol=1e-3)


def answered(llm: LLM, prompt: list[int], response: int) -> torch.Tensor:
    """Logits [response, vocabulary] that the engine computes for an answer of masks."""
    predicted = np.arange(len(prompt) + response) >= len(prompt)
    canvas = Canvas.masked(prompt, response, llm.loaded.config.mask_id)
    return llm.model.head(UncachedPasses(llm).hidden([Job(canvas, predicted)]))


@pytest.mark.parametrize("kind", ["document", "talk", "solved", "town"])
def test_the_engine_computes_what_was_trained_in_blocks(
    kind: str, base: Path, corpus: dict[str, Ragged], tmp_path: Path
) -> None:
    """Every noisy block of a canvas as a canvas of its own, which the engine's decoder masks."""
    length = 4
    canvas = draw_canvas(Canvases(corpus, conversations()), np.random.default_rng(3), {kind: 1.0}, [length], 256)
    adapter = train.Adapter(load_base(str(base), CPU), 4, 8.0, compiled=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for module in low_rank_modules(adapter.model).values():
            module.b.normal_(std=0.2)
        ids, rows, _, _, attention = stack_blocks([canvas])
        trained = adapter(ids, rows, attention)
    export(adapter.model, tmp_path / "merged", MASK, END, length)
    llm = LLM(str(tmp_path / "merged"), dtype="float32", device="cpu", quantization="none")
    assert llm.loaded.config.block_length == length
    compared = 0
    for prompt, ids_so_far, hidden, predicted in noisy_blocks(canvas):
        rest = len(ids_so_far) - len(prompt)
        canvas_of_block = Canvas.masked(prompt, rest, MASK)
        sees = block_causal_limits(llm, prompt, rest)
        canvas_of_block.tokens[:] = ids_so_far
        canvas_of_block.noisy[:] = hidden
        logits_of_engine = llm.model.head(UncachedPasses(llm).hidden([Job(canvas_of_block, hidden, sees)]))
        torch.testing.assert_close(logits_of_engine, trained[predicted], atol=1e-4, rtol=1e-3)
        compared += len(predicted)
    assert compared == len(canvas.rows) > 8


def block_causal_limits(llm: LLM, prompt: list[int], response: int) -> Any:
    """What the rows of a canvas attend to when the engine decodes it."""
    config = llm.loaded.config
    params = SamplingParams(max_tokens=response)
    decoding = BlockCausalDecoding.of(prompt, params, config.sampling, config.block_length, MASK, seed=0)
    return decoding.decoder(decoding.canvas(), "all").context.sees


def noisy_blocks(canvas: BlockCanvas) -> Iterator[tuple[list[int], list[int], Any, list[int]]]:
    """The prompt, the ids up to the end of a noisy block, which are masked, and which predictions are theirs."""
    text, copy, position, limit = canvas.attention
    starts = {int(number): int(limit[(text == number) & (copy > 0)].min()) for number in set(text.tolist()) - {-1}}
    # A row before a block is clean, and as often among those that predict as there are copies of the block.
    owner = dict[int, list[int]]()
    at = 0
    for number in sorted(set(copy.tolist()) - {0}):
        rows = np.flatnonzero(copy == number)
        masked = canvas.ids[rows] == MASK
        count = int(masked.sum())
        owner[number] = list(range(at, at + count))
        at += count
    for number, predicted in owner.items():
        rows = np.flatnonzero(copy == number)
        own = int(text[rows[0]])
        start = int(position[rows[0]])
        clean = np.flatnonzero((text == own) & (copy == 0))[:start]
        ids = [*canvas.ids[clean].tolist(), *canvas.ids[rows].tolist()]
        hidden = np.arange(len(ids)) >= start
        hidden[start:] = canvas.ids[rows] == MASK
        yield ids[: starts[own]], ids, hidden, predicted


def test_a_canvas_without_room_for_a_text_is_refused(corpus: dict[str, Ragged]) -> None:
    with pytest.raises(ValueError, match="canvases of 8 tokens leave no room"):
        draw_canvas(Canvases(corpus, conversations()), np.random.default_rng(0), {"talk": 1.0}, [4], 8)


def test_the_base_is_asked_and_judged(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tokenizer(base, VOCAB, None)
    questions, answer = open_questions()[:3], ask_base.answer
    monkeypatch.setattr(ask_base, "open_questions", lambda: questions)
    monkeypatch.setattr(ask_base, "answer", lambda *told: [*answer(*told)[:2], "It is Tokyo."])
    words = ["ask_base", str(tmp_path / "base.json"), "--base", str(base), "--max-tokens", "3"]
    monkeypatch.setattr(sys, "argv", words)
    ask_base.main()
    kept = json.loads((tmp_path / "base.json").read_text())["answers"]
    assert [row["question"] for row in kept] == [question.question for question in questions]
    assert [row["right"] for row in kept] == [False, False, True]
    assert all(row["answer"] and len(row["answer"].split()) <= 3 for row in kept)
    assert "1 of 3 questions with one answer: 33.3 %" in capsys.readouterr().out


def test_masks_of_a_block_are_those_of_decoding() -> None:
    rng = np.random.default_rng(0)
    drawn = [noise(rng, 8) for _ in range(400)]
    assert all(masked.any() for masked in drawn)
    assert 80 < sum(masked.all() for masked in drawn) < 240
    assert len({masked.tobytes() for masked in drawn}) > 60


@pytest.mark.parametrize("kind", ["document", "talk", "solved", "town"])
def test_what_is_predicted_is_masked_and_comes_again(kind: str, corpus: dict[str, Ragged]) -> None:
    canvases, rng = Canvases(corpus, conversations()), np.random.default_rng(0)
    drawn = [getattr(canvases, kind)(rng, 256) for _ in range(40)]
    for ids, gold, weight in drawn:
        assert ids.shape == gold.shape == weight.shape == (256,)
        assert (ids[weight > 0] == MASK).all()
        assert (ids == gold)[ids != MASK].all()
        assert (gold != MASK).all()
        assert weight[0] == 0
    assert all((weight > 0).any() for *_, weight in drawn)
    shares = [float((ids == MASK).mean()) for ids, *_ in drawn]
    assert min(shares) < 0.4 < max(shares)
    batch = stack(drawn)
    number, row = batch.rows // 256, batch.rows % 256
    assert torch.equal(
        batch.gold.long(), torch.from_numpy(np.stack([each.gold for each in drawn]))[number, row + 1].long()
    )
    if kind == "document":
        assert any((ids[:40] == MASK).any() for ids, *_ in drawn), "masks stand anywhere"
    if kind == "town":
        assert all((ids[:40] != MASK).all() for ids, *_ in drawn), "pages are read, not filled"


def test_token_ids_are_kept(tmp_path: Path) -> None:
    made = Ragged.of([[1, 2, 3], [], [151_669]])
    save_ragged(tmp_path / "x.npz", one=made, other=Ragged.of([]))
    found = load_ragged(tmp_path / "x.npz")
    assert [each.tolist() for each in (found["one"][n] for n in range(3))] == [[1, 2, 3], [], [151_669]]
    assert len(found["other"]) == 0


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ({"pieces": Ragged.of([[1, 8], [MASK]])}, "9 pieces, as it has 2"),
        ({"towns": None, "towns_held": None}, "towns, towns_held"),
    ],
)
def test_a_corpus_of_an_older_version_is_to_be_made_again(
    base: Path, corpus: dict[str, Ragged], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, lacks: str
) -> None:
    old = {name: each for name, each in (corpus | change).items() if each is not None}
    save_ragged(tmp_path / "old.npz", **old)
    with pytest.raises(ValueError, match=f"lacks {lacks}: make it again with python -m training.adapt.corpus"):
        run(base, tmp_path / "old.npz", tmp_path / "out", monkeypatch)


def test_prose_is_read_once(tmp_path: Path) -> None:
    sentence = "<p>These are <b>eight words</b> of plain English prose number{}.</p>"
    text = "".join(sentence.format(" x" * number) for number in range(20))
    (tmp_path / "a.html").write_text(text + "<p>x = 1; y = 2; z = 3; w = 4; 5; 6; 7; 8; 9</p>")
    (tmp_path / "b.html").write_text(text)
    (found,) = read_documents([tmp_path])
    assert found.startswith("These are eight words of plain English prose number. These are")
    assert "=" not in found
    asked = questions()
    assert len(asked) == len(set(asked)) > 2000
    assert "What is the capital of France?" in asked
    tested = {question.question for question in open_questions()}
    assert set(untested_questions()) == set(asked) - tested != set(asked), "no model is trained on its measure"


def test_the_base_writes_conversations(base: Path, corpus: dict[str, Ragged]) -> None:
    model = load_base(str(base), CPU)
    torch.manual_seed(0)
    asked = [corpus["asked"][number].tolist() for number in range(2)]
    talks = write_conversations(model, corpus["pieces"], asked, 0.0001, 64, 100)
    pairs = [(talks[n].tolist(), talks[n + 1].tolist()) for n in range(0, len(talks), 2)]
    told = [question for question, _ in pairs]
    assert len(pairs) >= 2
    assert asked[0] in told or asked[1] in told, "given questions are put as they are"
    assert all(END not in question and END not in answer[:-1] for question, answer in pairs)
    assert circles([1, 2, 3, 4, 5] * 6)
    assert not circles(list(range(30)))


def test_a_prefix_of_a_causal_model_looks_at_nothing_behind_it(base: Path, corpus: dict[str, Ragged]) -> None:
    model = load_base(str(base), CPU)
    sizes: dict[str, Any] = {"count": 3, "prefix": 24, "rest": 16}
    found = measure_reuse(model, corpus["documents_held"], CPU, MASK, **sizes)
    # The rest of a causal model is computed from stored K/V with attention that looks both ways, so only K/V are equal.
    assert found["masks"]["v"] == found["other"]["k"] == [1.0, 1.0]
    look_both_ways(model)
    found = measure_reuse(model, corpus["documents_held"], CPU, MASK, **sizes)
    assert found["masks"]["v"][0] == 1.0
    assert found["other"]["v"][1] < 1.0
    assert found["masks"]["agree"] <= 1.0


def run(base: Path, corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[dict[str, Any]]:
    words = [str(out), "--corpus", str(corpus), "--base", str(base), "--device", "cpu", "--workers", "0"]
    words += ["--write", "0", "--tokens", "512", "--held", "2", "--rank", "4", "--rate", "0.01", *more]
    monkeypatch.setattr(sys, "argv", ["train", *words])
    train.main()
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture
def prepared(corpus: dict[str, Ragged], tmp_path: Path) -> Path:
    save_ragged(tmp_path / "corpus.npz", **corpus)
    save_ragged(tmp_path / "talks.npz", conversations=conversations())
    return tmp_path / "corpus.npz"


def test_it_trains_saves_and_goes_on(base: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, talks = prepared.parent / "out", ["--conversations", str(prepared.parent / "talks.npz")]
    saved = [*talks, "--phases", "documents:2k", "conversations:2k", "--save", "0"]
    told = run(base, prepared, out, monkeypatch, *saved)
    assert [line["event"] for line in told].count("held out") == 3
    state = torch.load(out / "state.pt")
    assert state["phase"] == 1
    assert state["tokens"] > 1000
    assert (out / "adapter-0" / "adapter_model.safetensors").is_file()
    first = (out / "adapter" / "adapter_model.safetensors").read_bytes()
    again = run(base, prepared, out, monkeypatch, *saved)[len(told) :]
    assert [line["number"] for line in again if line["event"] == "phase"] == [1], "it goes on in the last phase"
    assert (out / "adapter" / "adapter_model.safetensors").read_bytes() == first, "which is over"
    saved[saved.index("conversations:2k")] = "conversations:4k"
    run(base, prepared, out, monkeypatch, *saved)
    assert torch.load(out / "state.pt")["tokens"] > state["tokens"]
    assert (out / "adapter" / "adapter_model.safetensors").read_bytes() != first
    with pytest.raises(ValueError, match="phase 'nonsense' is none of documents, conversations, answers, mixed"):
        train.Phase.parse("nonsense:3")


def test_a_block_causal_model_is_trained(base: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talks = ["--conversations", str(prepared.parent / "talks.npz"), "--blocks", "4", "8", "--length", "256"]
    told = run(base, prepared, prepared.parent / "out", monkeypatch, *talks, "--phases", "mixed:12k")
    before, after = [line for line in told if line["event"] == "held out"]
    assert set(before) - {"event", "at"} == {f"{kind}-{block}" for kind in train.HELD for block in (4, 8)}
    assert after["talk-4"]["loss"] < before["talk-4"]["loss"] - 0.5


@pytest.mark.thorough
def test_a_few_hundred_steps_learn_to_count(base: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talks = ["--conversations", str(prepared.parent / "talks.npz"), "--phases", "documents:20k", "conversations:150k"]
    told = run(base, prepared, prepared.parent / "out", monkeypatch, *talks, "--held", "16", "--rank", "16")
    before, between, after = [line for line in told if line["event"] == "held out"]
    assert after["document"]["loss"] < before["document"]["loss"] - 0.5
    # Losses, as the share that is right of 20 tokens turns on how a processor rounds.
    assert after["talk"]["loss"] < between["talk"]["loss"] - 2


def save_tokenizer(folder: Path, size: int, mask: str | None) -> None:
    """Words, with the template of a chat."""
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    words = [*special, "system", "user", "<hidden>", "assistant", *(f"w{number}" for number in range(7, size))]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(special)
    names = {"unk_token": "<unk>", "eos_token": "<|im_end|>"} | ({} if mask is None else {"mask_token": mask})
    made: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **names)  # type: ignore[no-untyped-call]
    made.chat_template = (
        "{% for turn in messages %}<|im_start|> {{ turn.role }} {{ turn.content }} <|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
    )
    made.save_pretrained(folder)


def call_export(monkeypatch: pytest.MonkeyPatch, base: Path, adapter: Path, out: Path, *more: str) -> Path:
    words = [str(out), "--base", str(base), "--adapter", str(adapter), *more]
    monkeypatch.setattr(sys, "argv", ["export", *words])
    exporting.main()
    return out


@torch.no_grad()
def reference_logits(kind: tuple[Any, Any], folder: Path, ids: list[int]) -> torch.Tensor:
    """What transformers computes of a folder with the class of its base, and a mask that shuts nothing out."""
    raw = json.loads((folder / "config.json").read_text())
    config = kind[0](**{key: value for key, value in raw.items() if key not in ("model_type", "architectures")})
    model = kind[1].from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")
    found: torch.Tensor = model(torch.tensor([ids]), attention_mask=torch.zeros(1, 1, len(ids), len(ids))).logits[0]
    return found


@pytest.mark.parametrize(
    ("kind", "changed", "tokens", "named", "mask", "said"),
    [
        pytest.param(LLAMA, {}, VOCAB - 4, None, VOCAB - 4, "a row of the base's embedding, which has 64", id="llama"),
        pytest.param(QWEN2, WINDOWS, VOCAB, "<hidden>", 5, "a row of the base's embedding, which has 64", id="qwen2"),
        pytest.param(QWEN3, {"head_dim": 16}, VOCAB, None, VOCAB, "the embedding grew from 64 to 65 rows", id="qwen3"),
    ],
)
def test_any_base_becomes_a_folder(
    kind: tuple[Any, Any],
    changed: dict[str, Any],
    tokens: int,
    named: str | None,
    mask: int,
    said: str,
    corpus: dict[str, Ragged],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = save_base(tmp_path / "base", kind, **changed)
    save_tokenizer(base, tokens, named)
    around = pieces(load_tokenizer(str(base)))
    assert around == [[1, 3], [2, 1, 4], [2, 1, 6], [1, 4], [], [1, 4], [1, 4], [mask], [2]]
    save_ragged(tmp_path / "corpus.npz", **corpus | {"pieces": Ragged.of(around)})
    save_ragged(tmp_path / "talks.npz", conversations=conversations())
    talks = ["--conversations", str(tmp_path / "talks.npz"), "--phases", "documents:1k", "--rate", "1"]
    told = run(base, tmp_path / "corpus.npz", tmp_path / "out", monkeypatch, *talks)
    assert told[0]["mask"].endswith(said)
    adapter = tmp_path / "out" / "adapter"
    merged = call_export(monkeypatch, base, adapter, tmp_path / "merged")
    assert said in capsys.readouterr().out

    tensors, factors = load_file(merged / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, was in load_file(base / "model.safetensors").items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        more = factors[f"{key}B.weight"].float() @ factors[f"{key}A.weight"].float() if "_proj.w" in name else None
        assert more is None or more.abs().max() > 1e-3
        wanted = was if more is None else was + more
        torch.testing.assert_close(tensors[name][: len(was)], wanted, atol=1e-6, rtol=1e-5)
    prompt, response = [*IDS[:9], 1, 4], 6
    canvas = [*prompt, *[mask] * response]
    whole = reference_logits(kind, merged, canvas)
    wanted = whole[len(prompt) - 1 : -1]
    trained = load_base(str(base), CPU)
    seat_mask(trained, mask)
    look_both_ways(trained)
    add_low_rank(trained, 4, 4.0)
    load_adapter(trained, adapter)
    torch.testing.assert_close(logits(trained, canvas), whole, atol=1e-4, rtol=0)
    llm = LLM(str(merged), dtype="float32", device="cpu", quantization="none")
    assert (llm.loaded.config.mask_id, llm.loaded.config.shift, llm.loaded.config.stop_ids) == (mask, 1, (2,))
    assert tokenizer_mask(merged) == mask
    torch.testing.assert_close(answered(llm, prompt, response), wanted, atol=1e-4, rtol=0)

    if mask == VOCAB:
        with pytest.raises(SystemExit):
            call_export(monkeypatch, base, adapter, tmp_path / "apart", "--apart")
        assert "has no row for the mask token 64; export without it" in capsys.readouterr().err
        return
    apart = call_export(monkeypatch, base, adapter, tmp_path / "apart", "--apart")
    own = json.loads((apart / "remask.json").read_text())
    asked: dict[str, Any] = {"adapter": str(adapter), "hf_overrides": own["hf_overrides"]}
    for model, words in ((apart, {}), (base, asked)):
        llm = LLM(str(model), dtype="float32", device="cpu", quantization="none", **words)
        torch.testing.assert_close(answered(llm, prompt, response), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_new_row_is_the_mean_of_the_others(tied: bool, tmp_path: Path) -> None:
    model = load_base(str(save_base(tmp_path, tie_word_embeddings=tied)), CPU)
    was = [each().weight.clone() for each in (model.get_input_embeddings, model.get_output_embeddings)]
    assert seat_mask(model, VOCAB) == "mask token 64: a new row, the embedding grew from 64 to 65 rows"
    for before, each in zip(was, (model.get_input_embeddings, model.get_output_embeddings), strict=True):
        torch.testing.assert_close(each().weight, torch.cat([before, before.mean(0, keepdim=True)]))
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied
    assert not any(each.requires_grad for each in model.parameters())
    assert model.config.vocab_size == VOCAB + 1


def test_other_bases_are_refused(tmp_path: Path) -> None:
    GPT2Config(n_layer=1, n_embd=8, n_head=2).save_pretrained(tmp_path)
    for load in (load_tokenizer, lambda name: load_base(name, CPU)):
        with pytest.raises(ValueError, match=r"is of type 'gpt2'; this recipe takes a base of llama, qwen2, qwen3$"):
            load(str(tmp_path))
    LlamaConfig(**SHAPE, attention_bias=True).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="'attention_bias' is true; supported: false"):
        load_base(str(tmp_path), CPU)
