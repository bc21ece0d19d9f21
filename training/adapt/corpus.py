"""Token ids of all that is trained on, so that the machine that trains needs no tokenizer.

    python -m training.adapt.corpus OUT.npz --base smollm2 --gsm8k FOLDER --html FOLDER [FOLDER ...]

`--gsm8k` is a folder with `train.jsonl` and `test.jsonl` (OpenAI, MIT). `--html` are folders of HTML in English, such
as Debian's documentation packages unpacked with `dpkg-deb -x`: paragraphs of at least eight words that are mostly
letters are kept, each once; a file is a document where it has 150 words of them. One document in fifty is held out, as
are GSM8K's test split and the pages of towns that are drawn last.

| name | what |
|---|---|
| documents, documents_held | English prose |
| plain, plain_held | questions and answers of GSM8K in turn, as "Question: ... Answer:" |
| solved, solved_held | the same as turns of a chat, without the chat's own tokens |
| asked | questions of `training.adapt.questions`, but for those that `thresholds open` asks |
| towns, towns_held | a page of `remask.tasks.town`, then `TOWN_QUESTIONS` questions and answers, and the next page |
| pieces | the chat's tokens, those of a first turn, the mask, and the end of an answer: `PIECES` in this order |
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from remask.tasks import town
from remask_lab.bench.documents import read_documents
from remask_lab.thresholds.measure import open_questions
from training.adapt.base import load_tokenizer
from training.adapt.questions import questions
from training.adapt.ragged import Ragged, load_ragged, save_ragged

PIECES: Final = ("system", "user", "assistant", "turn", "separator", "empty_system", "first", "mask", "end")
TOWN_QUESTIONS: Final = 8
_HALVES: Final = ("documents", "plain", "solved", "towns")
NAMES: Final = (*_HALVES, *(f"{name}_held" for name in _HALVES), "asked", "pieces")
_MARK = "\0"


def main() -> None:
    """Read, tokenize and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--html", type=Path, nargs="*", default=[])
    parser.add_argument("--towns", type=int, default=6000, help="pages")
    parser.add_argument("--documents", type=int, default=10_000_000, help="tokens of documents at most")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.base)

    def ids(texts: Sequence[str]) -> list[list[int]]:
        return list(tokenizer(list(texts), add_special_tokens=False)["input_ids"]) if texts else []

    documents = ids(list(read_documents(args.html)))
    random.Random(1).shuffle(documents)
    kept, total = [], 0
    for each in documents:
        total += len(each)
        if total > args.documents:
            break
        kept.append(each)
    held = kept[::50]
    del kept[::50]
    named = {"documents": Ragged.of(kept), "documents_held": Ragged.of(held)}
    for split, suffix in (("train", ""), ("test", "_held")):
        lines = (args.gsm8k / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        plain = [text for row in rows for text in (f"Question: {row['question']}\nAnswer:", f" {row['answer']}")]
        named[f"plain{suffix}"] = Ragged.of(ids(plain))
        named[f"solved{suffix}"] = Ragged.of(ids([text for row in rows for text in (row["question"], row["answer"])]))
    named["asked"] = Ragged.of(ids(untested_questions()))
    towns = ids(list(_towns(args.towns)))
    size = (1 + 2 * TOWN_QUESTIONS) * (args.towns // 50)
    named |= {"towns": Ragged.of(towns[:-size]), "towns_held": Ragged.of(towns[-size:])}
    named["pieces"] = Ragged.of(pieces(tokenizer))
    save_ragged(args.out, **named)
    print({name: (len(each), len(each.values)) for name, each in named.items()})


def untested_questions() -> list[str]:
    """Questions that people ask first, without those by which models are measured (`thresholds open`)."""
    tested = {question.question for question in open_questions()}
    return [question for question in questions() if question not in tested]


def load_corpus(file: Path) -> dict[str, Ragged]:
    """What `main` wrote. Raises `ValueError` where an older version of this file did, which wrote less."""
    found = load_ragged(file)
    lacks = [name for name in NAMES if name not in found]
    if not lacks and len(found["pieces"]) != len(PIECES):
        lacks = [f"{len(PIECES)} pieces, as it has {len(found['pieces'])}"]
    if lacks:
        raise ValueError(f"{file} lacks {', '.join(lacks)}: make it again with python -m training.adapt.corpus {file}")
    return found


def _towns(pages: int) -> Iterator[str]:
    """A page, its questions and answers, and the next page."""
    rng = random.Random(0)
    for _ in range(pages):
        shops = town.draw_page(rng, rng.choice((6, 8, 10, 12, 16, 20, 24)))
        yield town.page_text(shops)
        for number in range(TOWN_QUESTIONS):
            question, answer, _asked = town.draw_question(rng, shops, town.KINDS[number % len(town.KINDS)])
            yield question
            yield answer


def pieces(tokenizer: Any) -> list[list[int]]:
    """Token ids of `PIECES`: what the chat template writes around turns, the mask, and the end of an answer.

    `first` opens a chat without a system prompt: a turn from its first special token on.

    Raises `ValueError` where there is no template, or one that ends answers with plain text.
    """

    def written(turns: Sequence[dict[str, str]], **words: bool) -> list[str]:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, enable_thinking=False, **words)
        return text.split(_MARK)

    turns = [{"role": "system", "content": _MARK}, {"role": "user", "content": _MARK}]
    texts = written(turns, add_generation_prompt=True)
    texts += [written([*turns, {"role": "assistant", "content": _MARK}, turns[1]])[3], "\n\n", written(turns[1:])[0]]
    found = list(tokenizer(texts, add_special_tokens=False)["input_ids"])
    # An answer ends with a token of its own, which is predicted; what follows it belongs to the next question.
    behind = found[PIECES.index("turn")]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    places = [place for place, token in enumerate(behind) if token in special]
    if not places:
        raise ValueError("the chat template ends answers with no special token of the tokenizer")
    end, first = [*places, places[0] + 1][:2]
    found[PIECES.index("turn")] = behind[end + 1 :]
    return [*found, behind[first:], [tokenizer.mask_token_id], [behind[end]]]


if __name__ == "__main__":
    main()
