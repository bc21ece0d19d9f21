"""Random requests of every kind on one model: policies, rules and fields are those of the registries, none by hand."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from typing import Any, Literal, get_args, get_origin, get_type_hints

from remask.checks import ModelKind
from remask.checks.fields import Nested, declared, paths
from remask.checks.values import AnyOf, Biases, Choice, Flag, ListOf, Real, Text, Values, Whole
from remask.denoising.indel import EditTokens
from remask.denoising.rules import RULES, names_on
from remask.engine.engine import Engine
from remask.engine.request import Owner, Request
from remask.errors import ConfigError
from remask.families import FAMILIES
from remask.plan.canvas import OPEN, Hole, Template
from remask.policies import CachePolicy, parse
from remask.policies.bicache import DepthLookup, Earned
from remask.policies.registry import POLICIES, names_for
from remask.readers.base import Reader
from remask.readers.decision import Reading
from remask.readers.drafts import Drafts
from remask.readers.logprobs import Logprobs
from remask.request.sampling_params import SamplingParams
from remask.request.trace import TOP_LOGPROBS
from tests.engine.support import (
    DEADLINE,
    EOS,
    MASK_ID,
    VOCAB,
    CheckedTransformer,
    lively_adapters,
    lively_weights,
    poisoned_engine,
    small_config,
)
from tests.engine.test_constraint import drawn as drawn_form
from tests.sampling_fields import flat_params

NAMES = tuple(name.removesuffix("-tiny") for each in FAMILIES for name in each.presets if name.endswith("-tiny"))
TABLE = DepthLookup({5: 1, 30: 2, 60: 3})
ADAPTERS = ("one", "two")
TRIES = 200
# Lengths that must suit one another, or no request would be accepted; `_shape` draws them together.
SHAPE = (
    "max_tokens",
    "steps",
    "block_length",
    "sub_block_length",
    "order",
    "canvas_length",
    "initial_canvas",
    "preset",
)


@cache
def model_of(family: str) -> CheckedTransformer:
    """A small model of a family, in float64, with adapters beside it."""
    config = small_config(family)
    noise = config.noise and replace(config.noise, vocab=VOCAB, mask_id=MASK_ID)
    if noise and noise.anchor is not None:  # what closes an answer is of the vocabulary too
        noise = replace(noise, anchor=(MASK_ID - 2, MASK_ID - 1))
    edits = config.edit_tokens and EditTokens(MASK_ID - 2, MASK_ID - 1)
    config = replace(config, layers=3, noise=noise, edit_tokens=edits)
    return CheckedTransformer(config, lively_adapters(lively_weights(config), ADAPTERS))


def letters(tokens: Sequence[int]) -> str:
    """A text with a letter for each token, so that stop texts end some responses."""
    return "".join(chr(97 + token % 26) for token in tokens)


def engine_for(family: str, **limits: Any) -> Engine:
    """An engine whose memory is NaN until it is written."""
    return poisoned_engine(model_of(family), letters, **limits)


def engine_limits(rng: random.Random, family: str) -> dict[str, Any]:
    """Settings of an engine under which all requests can run, its memory and budgets mostly too small."""
    shape = model_of(family).config
    block = 1 if shape.self_conditioning else shape.block_length or 1
    sharing = rng.choice(["exact", "exact", "auto"])
    limits: dict[str, Any] = {
        "max_num_seqs": rng.randint(2, 8),
        "max_row_layers": rng.choice([None, None, 60, 200]),
        "max_refreshes": rng.choice([None, None, 1]),
        "page_size": block * rng.choice([1, 2]) if block > 1 else rng.choice([3, 4, 16]),
        "store_budget_tokens": rng.choice([10, 24, 64]),
        "eviction": rng.choice(["fifo", "lru"]),
        "attention": rng.choice(["torch", "torch", "numpy"]),
    }
    if rng.random() < 0.2:
        return limits | {"batch_invariant": True, "overlap": False, "graphs": False, "attention": "torch"}
    limits |= {"prefix_sharing": sharing, "prefix_min": 3, "prefix_match": rng.choice(["exact", "longest"])}
    limits |= {"overlap": rng.random() < 0.6, "graphs": shape.mixture is None and rng.random() < 0.3}
    return limits | {"audit": rng.choice([0.0, 0.3, 1.0]), "audit_bound": rng.choice([0.1, 2.0])}


def value_of(rng: random.Random, values: Values) -> Any:
    """A small one of these values, as a request names it."""
    match values:
        case Flag():
            return rng.random() < 0.5
        case Whole():
            return rng.randint(max(values.low, 0), min(values.high, max(values.low, 0) + 5))
        case Real():
            drawn = rng.choice([values.low, 0.05, 0.3, 0.6, 0.9, 1.0, 1.7, 30.0])
            return drawn if values.fits(drawn) else 0.5
        case Choice():
            return rng.choice(values.names)
        case Text():
            return letters([rng.randrange(26) for _ in range(rng.randint(1, 2))])
        case ListOf():
            return [value_of(rng, values.values) for _ in range(rng.randint(0, 3))]
        case Biases():
            tokens = rng.sample(range(VOCAB), rng.randint(0, 3))
            return {token: rng.choice([-values.size, -1.5, 0, 2.5]) for token in tokens}
        case AnyOf():
            return value_of(rng, rng.choice(values.sets))
        case Nested():
            return fields_of(rng, values.cls)
    raise AssertionError(f"no value of {values} is drawn")


def fields_of(rng: random.Random, cls: type) -> dict[str, Any]:
    """Some of the fields of a declared class, each with a small value."""
    return {name: value_of(rng, each.values) for name, each in declared(cls).items() if rng.random() < 0.3}


def _members(hint: Any) -> Iterator[Any]:
    """The types, and the values of literals, of a union."""
    if get_origin(hint) is Literal or not get_args(hint):
        yield hint
    else:
        for each in get_args(hint):
            yield from _members(each)


def _setting(rng: random.Random, hint: Any) -> Any:
    """A value of a policy's setting, by the type of its field; the policy refuses what it does not take."""
    one = rng.choice(list(_members(hint)))
    if get_origin(one) is Literal:
        return rng.choice(get_args(one))
    drawn: dict[Any, Callable[[], Any]] = {
        int: lambda: rng.choice([0, 1, 2, 3, 8, 16]),
        float: lambda: rng.choice([0.0, 0.1, 0.5, 0.9, 0.99, 1.0, 3.0]),
        bool: lambda: rng.random() < 0.5,
        type(None): lambda: None,
        DepthLookup: lambda: "table",
        Earned: lambda: "earned",
    }
    return drawn[one]()


def random_policy(rng: random.Random, kind: ModelKind, name: str) -> CachePolicy:
    """The policy called `name` with any settings, before others where it can stand there."""
    usable = names_for(kind)
    for _ in range(TRIES):
        chain = [name]
        while POLICIES.get(chain[-1]).inner is not None and rng.random() < 0.7:
            chain.append(rng.choice(usable))
        settings = {}
        for each in chain:
            made = POLICIES.get(each)
            hints = get_type_hints(made.make)
            for setting, field in made.settings.items():
                if rng.random() < 0.4:
                    settings[f"{each}.{setting}"] = _setting(rng, hints[field])
        try:
            return parse("+".join(chain), settings, lambda: TABLE)
        except ConfigError:
            continue
    raise AssertionError(f"no settings of {name} are taken")


def _shape(rng: random.Random, kind: ModelKind, prompt: int, tokens: int, block: int | None) -> dict[str, Any]:
    shape: dict[str, Any] = {"max_tokens": tokens}
    if block is None and rng.random() < 0.6:
        shape["block_length"] = rng.choice([each for each in range(1, tokens + 1) if tokens % each == 0])
    if kind == "masked" and rng.random() < 0.5:
        blocks = tokens // shape.get("block_length", tokens)
        shape["steps"] = blocks * rng.randint(1, 5)
    if kind == "block_causal" and rng.random() < 0.3:
        whole = block or 4
        shape["sub_block_length"] = rng.choice([each for each in range(1, whole + 1) if whole % each == 0])
    if kind == "uniform":
        shape["canvas_length"] = rng.randint(prompt + tokens, max(40, prompt + tokens))
        if rng.random() < 0.3:
            canvas = shape["canvas_length"] - prompt
            shape["initial_canvas"] = [rng.randrange(MASK_ID) for _ in range(canvas)]
    return shape


def _order(rng: random.Random, prompt: int, shape: dict[str, Any], template: Template | None) -> list[list[int]]:
    tokens = shape["max_tokens"]
    block = shape.get("block_length", tokens)
    open_ = [True] * tokens if template is None else (~template.pinned).tolist()
    blocks = [[p for p in range(at, min(at + block, tokens)) if open_[p]] for at in range(0, tokens, block)]
    return [[prompt + place for place in rng.sample(each, len(each))] for each in blocks if each]


def random_params(
    rng: random.Random, kind: ModelKind, prompt: int, block: int | None, template: Template | None, rule: str | None
) -> SamplingParams:
    """Any fields that have a meaning on this kind of model; those that contradict each other are drawn again."""
    flat = {path.rpartition(".")[2]: each for path, each in paths(SamplingParams).items() if kind in each.kinds}
    fields = {name: each for name, each in flat.items() if name not in {*SHAPE, "rule", "config"}}
    if "rule" in flat:
        fields["remasking"] = flat["rule"]
    tokens = rng.randint(1, 8) if template is None else len(template)
    for _ in range(TRIES):
        values = {name: value_of(rng, each.values) for name, each in fields.items() if rng.random() < 0.12}
        if rule is not None:
            values["remasking"] = rule
        shape = _shape(rng, kind, prompt, tokens, block)
        if "remasking" in values and (own := RULES.get(values["remasking"]).config) is not None:
            values["config"] = fields_of(rng, own)
        if values.get("remasking") == "order":
            values["order"] = _order(rng, prompt, shape, template)
        values |= shape | {"seed": rng.randrange(1000)}
        if template is not None or rng.random() < 0.5:
            values |= {"ignore_eos": True}
        try:
            return flat_params(values)
        except ConfigError:
            continue
    raise AssertionError(f"no parameters with the rule {rule} are taken")


def random_template(rng: random.Random) -> Template:
    """Fixed runs and holes in turn; holes want some of their tokens not to be padding."""
    tokens: list[int] = []
    holes: list[Hole] = []
    while len(tokens) < 4 or not holes:
        count = rng.randint(1, 4)
        if rng.random() < 0.5:
            tokens += [rng.randrange(VOCAB) for _ in range(count)]
        else:
            holes.append(Hole(len(tokens), len(tokens) + count, rng.randint(0, count)))
            tokens += [OPEN] * count
    return Template(tuple(tokens), tuple(holes), rng.choice([(), (EOS,)]))


def random_readers(rng: random.Random) -> Iterator[Reader]:
    """What has no say in what is written."""
    if rng.random() < 0.2:
        yield Drafts()
    top = rng.choice([None, None, 0, 3, TOP_LOGPROBS])
    if top is not None:
        yield Logprobs(top)


def random_reading(rng: random.Random) -> Reading:
    """An answer of some masks, of which one at least is read."""
    tokens = tuple(rng.randrange(MASK_ID) for _ in range(rng.randint(1, 6)))
    masks = sorted(rng.sample(range(len(tokens)), rng.randint(1, len(tokens))))
    read = rng.sample(masks, rng.randint(1, len(masks)))
    return Reading(tokens, tuple(masks), {place: tuple(rng.sample(range(MASK_ID), 3)) for place in sorted(read)})


@dataclass(frozen=True)
class Drawing:
    """Draws requests for one engine, so that each policy and each rule has its turn."""

    rng: random.Random
    engine: Engine

    def requests(self, count: int) -> Iterator[Request]:
        """So many requests that the engine's `check` accepts."""
        kind = self.engine.model.config.kind
        policies, rules = list(names_for(kind)), list(names_on(kind))
        self.rng.shuffle(policies)
        self.rng.shuffle(rules)
        turns = zip(cycle(policies), cycle([*rules, None]), strict=False)
        found = 0
        for policy, rule in turns:
            asked = self.accepted(f"r{found}", policy, rule)
            if asked is not None:
                yield asked
                found += 1
            if found == count:
                return

    def accepted(self, name: str, policy: str, rule: str | None) -> Request | None:
        """A request that `check` accepts; None where none of many is, as some policies are not for all families."""
        for attempt in range(TRIES):
            # Some policies take some rules only.
            asked = self._drawn(name, policy, rule if attempt < TRIES // 4 else None)
            try:
                self.engine.check(asked)
            except ConfigError:
                continue
            return asked
        return None

    def _drawn(self, name: str, policy: str, rule: str | None) -> Request:
        rng, shape = self.rng, self.engine.model.config
        prompt = self._prompt()
        template = random_template(rng) if rng.random() < 0.2 else None
        asked = Request(
            name,
            prompt,
            random_params(rng, shape.kind, len(prompt), shape.block_length, template, rule),
            policy=random_policy(rng, shape.kind, policy),
            adapter=rng.choice([None, *ADAPTERS]),
            cache_salt=rng.choice(["", "", "", "tenant"]),
            priority=rng.choice([0, 0, 0, -1, 1]),
            deadline_s=rng.choice([None, None, None, DEADLINE]),
            owner=Owner(rng.choice("ab"), rng.choice("xy")),
            readers=tuple(random_readers(rng)),
            template=template,
        )
        if rng.random() < 0.7:
            asked = replace(asked, prefix_length=rng.randint(0, len(prompt)), find_prefix=rng.random() < 0.3)
        if rng.random() < 0.08:
            reading = random_reading(rng)
            params = SamplingParams(max_tokens=len(reading.token_ids))
            return replace(asked, params=params, template=None).with_readers(reading)
        if rng.random() < 0.2:
            length = asked.response.open_places
            asked = asked.with_readers(drawn_form(rng, VOCAB, MASK_ID, (EOS,), length)[0])
        return asked

    def _prompt(self) -> list[int]:
        rng = self.rng
        shared = random.Random(f"prompt {rng.randrange(2)}")
        lead = [shared.randrange(VOCAB) for _ in range(16)][: rng.randint(1, 16)]
        prompt = lead + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))]
        edits = self.engine.model.config.edit_tokens
        return prompt if edits is None else [0 if token in (edits.delete, edits.insert) else token for token in prompt]
