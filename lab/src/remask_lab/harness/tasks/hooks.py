"""The functions that lm-eval calls from the configs in this folder."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from remask_lab.harness.formats import FORMATS
from remask_lab.harness.score import judge
from remask_lab.records.jsonl import Line

# fmt: off
BBH = (
    "boolean_expressions", "causal_judgement", "date_understanding", "disambiguation_qa", "dyck_languages",
    "formal_fallacies", "geometric_shapes", "hyperbaton", "logical_deduction_five_objects",
    "logical_deduction_seven_objects", "logical_deduction_three_objects", "movie_recommendation",
    "multistep_arithmetic_two", "navigate", "object_counting", "penguins_in_a_table", "reasoning_about_colored_objects",
    "ruin_names", "salient_translation_error_detection", "snarks", "sports_understanding", "temporal_sequences",
    "tracking_shuffled_objects_five_objects", "tracking_shuffled_objects_seven_objects",
    "tracking_shuffled_objects_three_objects", "web_of_lies", "word_sorting",
)
# fmt: on
"""Names of BIG-Bench Hard's tasks. Each is a configuration of the data set."""


def bbh_dataset(**_: Any) -> Mapping[str, Any]:
    """All of BIG-Bench Hard's tasks as one split, from the hub."""
    from datasets import concatenate_datasets, load_dataset

    return {"test": concatenate_datasets([load_dataset("SaylorTwift/bbh", name)["test"] for name in BBH])}


def strict(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm-eval's `process_results`: whether the final answer matches strictly, and whether up to notation."""
    return judge(results[0], doc["right"]).metrics


def _read_dataset(name: str, dataset: Any) -> Any:
    """The records of a data set as questions and right answers, read by the format of the task `name`."""
    read = FORMATS[name].read

    def prepare(doc: Mapping[str, Any], number: int) -> dict[str, str]:
        question = read(Line(f"{name}, record {number}:", doc, {}))
        return {"asked": question.asked, "right": question.right}

    return dataset.map(prepare, with_indices=True)


def __getattr__(name: str) -> Any:
    """A config's `process_docs`, by the name of its benchmark."""
    if name not in FORMATS:
        raise AttributeError(name)
    return partial(_read_dataset, name)
