"""The bundled graded model's folder: complete, with a tokenizer of its task, and answers that need what they claim."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import remask
from remask import LLM, EngineConfig, SamplingParams
from remask.tasks import relay
from remask_lab.bench.workload import RELAY_SAMPLING, TaskChoice, Workload, chat_workload

FOLDER = Path(remask.__file__).parent / "bundled"
CONFIG: dict[str, object] = json.loads((FOLDER / "config.json").read_text())
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
assert isinstance(TOKENIZER, PreTrainedTokenizerFast)
QUESTIONS = 16


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=QUESTIONS))


@pytest.fixture(scope="module")
def workload(llm: LLM) -> Workload:
    return chat_workload(
        llm, TaskChoice("relay"), QUESTIONS, QUESTIONS // 2, 11, SamplingParams.from_mapping(RELAY_SAMPLING)
    )


def right(llm: LLM, workload: Workload, cache: str, **settings: object) -> int:
    policy = llm.session.policy(cache, settings)
    work = [task.request.with_policy(policy) for task in workload.tasks]
    texts = {
        output.id: output.text for output in llm.session.run(work, engine=llm.session.new_engine(), progress=False)
    }
    return sum(bool(task.correct(texts[task.request.id])) for task in workload.tasks)


def test_files() -> None:
    names = {"config.json", "remask.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert names <= {path.name for path in FOLDER.iterdir()}
    assert (FOLDER / "model.safetensors").stat().st_size < 4 << 20


def test_config_has_what_a_llada_loader_reads() -> None:
    assert CONFIG["model_type"] == "llada"
    assert CONFIG["weight_tying"] is False
    assert CONFIG["embedding_size"] == CONFIG["vocab_size"] == len(TOKENIZER)
    assert (TOKENIZER.mask_token_id, TOKENIZER.eos_token_id) == (CONFIG["mask_token_id"], CONFIG["eos_token_id"])
    assert "auto_map" not in CONFIG


def test_weights_are_float16_and_finite() -> None:
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118  (no mapping)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    assert {str(tensor.dtype) for tensor in tensors} == {"torch.float16"}


def test_every_word_of_the_task_is_one_token() -> None:
    for request in relay.make_workload(30, 10, 0):
        assert len(encode(request.reference)) == relay.HOPS
        # A good, a town and a mark each, after "Goods" and its colon.
        assert len(encode(request.prompt.text)) == 2 + 3 * len(request.prompt.rows)


def test_texts_beyond_the_vocabulary_are_read_and_written() -> None:
    for text in ("héllo  wörld\n\n 12 3,4\t😀 ", " figs", "Lima figs  figs", "\r\n", "winters"):
        assert TOKENIZER.decode(encode(text)) == text


def test_the_prefix_is_what_questions_share(workload: Workload) -> None:
    assert 0.75 <= workload.prefix_ratio <= 0.85


def test_routes_are_right_hop_by_hop_and_wrong_in_fewer_steps(llm: LLM, workload: Workload) -> None:
    assert right(llm, workload, "none") >= QUESTIONS - 1
    for steps in (1, relay.HOPS // 2):
        fewer = workload.under(SamplingParams.from_mapping({**RELAY_SAMPLING, "steps": steps}))
        assert right(llm, fewer, "none") <= QUESTIONS // 4


def test_a_prefix_that_never_saw_the_question_misleads(llm: LLM, workload: Workload) -> None:
    assert right(llm, workload, "reuse") <= QUESTIONS // 8


def test_the_shipped_table_keeps_the_answers(llm: LLM, workload: Workload) -> None:
    table = llm.depth_table
    assert table is not None
    assert table.model == "bundled"
    assert "remask.tasks.relay" in table.source
    assert table.entries
    assert right(llm, workload, "bicache") >= right(llm, workload, "none") - 1


def test_the_season_of_the_question_decides(llm: LLM) -> None:
    """One system prompt and start in both seasons: two routes, and the model gives each."""
    asked = []
    for request in relay.make_workload(6, 6, 5):
        (one, starts), (other, others) = request.prompt.starts
        start = next(town for town in starts if town in others)
        for season in (one, other):
            question = relay.RelayQuestion(season, start)
            reference = relay.reference_response(request.prompt, question)
            asked.append(replace(request, question=question, reference=reference))
    outputs = llm.generate([request.messages for request in asked])
    wrong = [
        each for each, out in zip(asked, outputs, strict=True) if not relay.is_correct(out.text or "", each.reference)
    ]
    assert len(wrong) <= 1
    assert all(one.reference != other.reference for one, other in zip(asked[::2], asked[1::2], strict=True))
