"""Bodies made of the declared fields: what a declaration allows, most of it such that the request can run."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from remask.checks import ModelKind
from remask.checks.fields import Declared, Nested, declared
from remask.checks.values import AnyOf, Biases, Choice, Flag, ListOf, Real, Settings, Text, Values, Whole
from remask.denoising.rules import RULES, names_on
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms

Bodies = st.SearchStrategy[dict[str, Any]]

USUAL = 16  # numbers are most often so far from their lower bounds at most
LENGTH = 16
DEADLINE_S = 3.0  # of bodies that may ask for as many steps as there may be
# What the declarations leave to the code that knows the model, the policy or other fields.
_CHOSEN = (
    "adapter",
    "cache",
    "cache_config",
    "order",
    "initial_canvas",
    "max_tokens",
    "block_length",
    "canvas_length",
    "top_logprobs",
)


def values_of(values: Values, kind: ModelKind, usual: bool = True) -> st.SearchStrategy[Any]:
    """Values of a set: near its lower bound where they are `usual`, else all, the bounds most often."""
    match values:
        case Whole(low, high):
            near = st.integers(max(low, 0), min(high, max(low, 0) + USUAL))
            return near if usual else near | st.sampled_from([low, high, high - 1]) | st.integers(low, high)
        case Real(low, high, above):
            top = min(high, low + (1.0 if usual else 1e30))
            return st.floats(low, top, exclude_min=above, allow_nan=False).map(lambda number: number or 0.0)
        case Flag():
            return st.booleans()
        case Choice():
            return st.sampled_from(values.names)
        case Text():
            text = st.text(
                st.characters(codec="utf-8", exclude_characters="\x00"), min_size=0, max_size=8 if usual else 300
            )
            return text.filter(values.fits)
        case ListOf(of):
            several = st.lists(values_of(of, kind, usual), max_size=3 if usual else 40)
            return (several | values_of(of, kind, usual)) if values.single else several
        case Nested(cls):
            return fields_of(drawn(cls, kind), kind, usual)
        case AnyOf(sets):
            return st.one_of([values_of(each, kind, usual) for each in sets])
        case Biases(_, size):
            number = st.floats(-size, size, allow_nan=False)
            return st.dictionaries(st.integers(1, 20).map(str), number, max_size=3 if usual else 40)
        case Settings():
            return st.just({})
        case _:
            raise TypeError(f"no strategy for {values!r}")


def drawn(cls: type, kind: ModelKind) -> dict[str, Declared]:
    """The fields of a declaring class that are drawn for a kind of model."""
    found = {name: each for name, each in declared(cls).items() if kind in each.kinds and name not in _CHOSEN}
    if "rule" in found:
        rules = tuple(name for name in names_on(kind) if name != "order")
        found["rule"] = replace(found["rule"], values=Choice(rules))
    return found


def fields_of(declarations: dict[str, Declared], kind: ModelKind, usual: bool = True, most: int = 3) -> Bodies:
    """A few of the declared fields, each with one of its values."""
    pairs = [
        st.tuples(st.just(name), values_of(declaration.values, kind, usual))
        for name, declaration in declarations.items()
    ]
    return st.lists(st.one_of(pairs), max_size=most, unique_by=lambda pair: pair[0]).map(dict)


def _fitted(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, but for those that contradict another one that was drawn before."""
    body = dict(fields)
    given = list(body)
    for one, other in (("steps", "steps_per_block"), ("steps", "threshold")):
        if one in body and other in body:
            del body[max(one, other, key=given.index)]
    remasking = body.get("remasking", {})
    if "threshold" in body:
        remasking.pop("factor", None)
    rule = remasking.get("rule")
    if rule not in ("entropy", "topk_margin", "maskgit_plus", "origin"):
        remasking.pop("eps", None)  # other rules know no schedule of times
    own = None if rule is None else RULES.get(rule)
    if own is None or own.config is None:
        remasking.pop("config", None)
    if own is not None and not own.uses_steps:
        for name in ("steps", "steps_per_block"):
            body.pop(name, None)
    if rule == "confidence_threshold":
        body.setdefault("threshold", 0.9)
    uniform = body.get("uniform", {})
    if not uniform.get("correction_steps"):
        for name in ("correction_temperature", "correction_tokens", "correction_patience"):
            uniform.pop(name, None)
    return body


def _lists(prompt: list[Any]) -> list[list[int]]:
    return prompt if isinstance(prompt[0], list) else [prompt]


def canvases(vocab: int) -> st.SearchStrategy[list[dict[str, Any]]]:
    ids = st.lists(st.integers(0, vocab - 2), min_size=1, max_size=3)
    fixed = st.lists(ids.map(lambda tokens: {"token_ids": tokens}), max_size=2)
    length = st.integers(1, 8)
    hole = (length | length.map(lambda most: {"max": most})).map(lambda mask: {"mask": mask})
    return st.tuples(fixed, hole, fixed).map(lambda parts: [*parts[0], parts[1], *parts[2]])


@st.composite
def bodies(
    draw: st.DrawFn, kind: ModelKind, policies: tuple[str, ...], vocab: int, usual: bool = True
) -> dict[str, Any]:
    """A body of `/v1/completions` whose fields are declared for this kind of model."""
    # Most lists of parts are none of a canvas.
    apart = {*_CHOSEN, "canvas"} if usual else set(_CHOSEN)
    if usual and kind == "block_causal":
        apart.add("suffix")  # refused, as a hole stands before it
    terms = {name: declaration for name, declaration in declared(Terms).items() if name not in apart}
    sampling = draw(fields_of(drawn(SamplingParams, kind), kind, usual))
    fields = _fitted({**sampling, **draw(fields_of(terms, kind, usual, most=2))})
    block = draw(st.sampled_from([1, 2, 4, 8]))
    body: dict[str, Any] = {"max_tokens": LENGTH, "block_length": block, **fields}
    if kind == "masked" and draw(st.booleans()):
        del body["block_length"]
    if kind == "uniform":
        body.pop("return_step_maps", None)
    if kind == "uniform" and usual:
        body["uniform"] = {**body.get("uniform", {}), "canvas_length": 64}
    if kind == "block_causal":
        del body["block_length"]  # the model's own
    if usual and "deadline_s" in body:
        body["deadline_s"] += 600
    if "steps" in body and usual:
        body["steps"] = LENGTH // block * max(1, body["steps"] * block // LENGTH)
    ids = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=12)
    text = st.sampled_from(["from ivy", "from birch go 1 , where am i ?", "é x"]) | st.text(
        "abc ,", min_size=1, max_size=20
    )
    body["prompt"] = draw(text | ids | st.lists(ids, min_size=1, max_size=2))
    if not usual:
        body.setdefault("deadline_s", DEADLINE_S)
    shortest = 1 if isinstance(body["prompt"], str) else min(map(len, _lists(body["prompt"])))
    if usual and "prefix_length" in body:
        body["prefix_length"] = min(body["prefix_length"], shortest)
    if usual and kind != "block_causal" and draw(st.integers(0, 5)) == 0:
        body.pop("suffix", None)
        del body["max_tokens"]  # the parts of a canvas say it
        body["canvas"] = draw(canvases(vocab))
    if usual and "min_tokens" in body:
        body["min_tokens"] = min(body["min_tokens"], 1 if "canvas" in body else LENGTH)
    if draw(st.booleans()):
        body["cache"] = draw(st.sampled_from(policies))
    for name, values in {
        "n": st.integers(1, 2),
        "stream": st.booleans(),
        "logprobs": st.none() if kind == "uniform" else st.integers(0, 20),
        "return_token_ids": st.booleans(),
        "user": st.text(max_size=5),
    }.items():
        if draw(st.integers(0, 5)) == 0:
            body[name] = draw(values)
    return body
