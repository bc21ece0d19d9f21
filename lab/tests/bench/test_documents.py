"""Documents as a workload: what is read of HTML, and where a window's prefix and answer lie."""

from pathlib import Path

import pytest

from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask_lab.bench.documents import document_workload, read_documents

PARAMS = SamplingParams(max_tokens=4, steps=2, block_length=2)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled", dtype="float32", progress=False)


def test_prose_is_read_once(tmp_path: Path) -> None:
    prose = "These are some plain words that stand in a row &amp; say next to nothing, " * 14
    short = "<p>Too few words.</p><p>x = 1; y = 2; z = 3; a[0] = 4; b[1] = 5; c[2] = 6; d[3] = 7</p>"
    (tmp_path / "a.html").write_text(f"<h1>Title</h1><p class='x'>{prose}</p>{short}")
    (tmp_path / "b.html").write_text(f"<p>{prose}</p>")
    (tmp_path / "c.html").write_text("<p>This is a single paragraph of ten plain words here.</p>")
    (found,) = read_documents([tmp_path])
    assert found == " ".join(prose.replace("&amp;", "&").split())


def test_windows_are_a_prefix_a_rest_and_an_answer(llm: LLM) -> None:
    assert llm.tokenizer is not None
    texts = [f"from ivy go {word} , " * 20 for word in ("one", "two", "three")]
    workload = document_workload(llm, texts, count=2, canvas=20, ratio=50, seed=7, sampling=PARAMS)
    assert workload.prefixes == len(workload.tasks) == 2
    for task in workload.tasks:
        assert len(task.request.prompt_token_ids) == 16
        assert task.request.prefix_length == 10
        window = llm.tokenizer.decode(task.request.prompt_token_ids)
        assert sum(window[:20].strip() in text for text in texts) >= 1
        assert task.reference is not None
        assert len(llm.tokenizer.encode(task.reference, add_special_tokens=False)) == 4
    again = document_workload(llm, texts, count=2, canvas=20, ratio=50, seed=7, sampling=PARAMS)
    assert [each.request.prompt_token_ids for each in again.tasks] == [
        each.request.prompt_token_ids for each in workload.tasks
    ]


@pytest.mark.parametrize(("canvas", "ratio", "said"), [(20, 90, "leave no room"), (2000, 50, "of 1 documents 0 have")])
def test_what_has_no_room_is_refused(llm: LLM, canvas: int, ratio: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        document_workload(
            llm, ["from ivy go one , " * 20], count=1, canvas=canvas, ratio=ratio, seed=7, sampling=PARAMS
        )
