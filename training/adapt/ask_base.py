"""What the base itself answers to the questions of `thresholds open`, token by token, judged by the same rule.

    python -m training.adapt.ask_base OUT.json --base smollm2 [--max-tokens 48]

A diffusion model made of it is measured against this by `python -m remask_lab thresholds open --model MODEL`.
"""

import argparse
import json
from pathlib import Path

import torch

from remask_lab.records.interval import estimate, percent_text
from remask_lab.thresholds.measure import RULE, open_questions
from training.adapt.base import load_base, load_tokenizer


@torch.no_grad()
def answer(base: str, questions: list[str], most: int) -> list[str]:
    """The base's most probable tokens after each question, in its own chat template, `most` at most."""
    model, tokenizer = load_base(base, torch.device("cpu")), load_tokenizer(base)
    texts = []
    for question in questions:
        turns = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = model.generate(**prompt, max_new_tokens=most, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        texts.append(tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def main() -> None:
    """Ask, judge and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer (default: %(default)s)")
    args = parser.parse_args()
    questions = open_questions()
    texts = answer(args.base, [question.question for question in questions], args.max_tokens)
    right = [question.right(text) for question, text in zip(questions, texts, strict=True)]
    judged = [
        {"question": question.question, "answer": text, "right": is_right, "has_one_answer": bool(question.accepted)}
        for question, text, is_right in zip(questions, texts, right, strict=True)
    ]
    facts = {"base": args.base, "max_tokens": args.max_tokens, "torch": torch.__version__, "answers": judged}
    args.out.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    factual = [is_right for question, is_right in zip(questions, right, strict=True) if question.accepted]
    share, *ends = estimate(factual, range(len(factual)))
    print(f"{sum(factual)} of {len(factual)} questions with one answer: {percent_text(share, ends)}\n{RULE}")


if __name__ == "__main__":
    main()
