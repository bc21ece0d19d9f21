"""From a response as a request writes it to its template and its sampling parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from remask.errors import CanvasLengthError, ConfigError
from remask.plan.canvas import OPEN, Hole, Template
from remask.request.sampling_params import SamplingParams
from remask.request.terms import MaskLength, Part, Terms
from remask.text.tokenizer import Tokenizer

Resolve: TypeAlias = Callable[[Mapping[str, Any], int, Template | None], SamplingParams]
"""The sampling parameters of a request that sets some itself, beside so many given tokens, for a template or a hole."""


def response_of(
    terms: Terms,
    own: Mapping[str, Any],
    prompt: int,
    tokenizer: Tokenizer | None,
    stop_ids: Sequence[int],
    resolve: Resolve,
    longest: int,
    around: tuple[str, str] | None = None,
) -> tuple[SamplingParams, Template | None]:
    """The sampling parameters of a request that sets `own` ones, and its template; None where all is one hole.

    `prompt` is the prompt's length in tokens, `stop_ids` are the model's end tokens, which are padding in holes. A
    canvas of more than `longest` positions is refused before anything of its length is made. `around` are texts before
    and behind a hole of `max_tokens`, which the answer does not show, as a suffix; they may name special tokens. Raises
    `ConfigError` where the parts and the parameters contradict each other or cannot be met.
    """
    control = terms.control_tokens is True
    trusted = control or terms.suffix is None
    if terms.suffix is not None:
        around = ("", terms.suffix)
    if terms.canvas is not None:
        if own.get("max_tokens") is not None:
            raise ConfigError("max_tokens: the parts of a canvas say how long the response is; leave it out")
        holes = sum(part.mask.max or 0 for part in terms.canvas if isinstance(part.mask, MaskLength))
        _check_length(prompt, holes, longest, f"holes of {holes}")
        template = template_of(terms.canvas, tokenizer, control_tokens=control)
    elif around is not None:
        before, behind = (_encoded(text, tokenizer, trusted) for text in around)
        fixed = prompt + len(before) + len(behind)
        hole = resolve(own, fixed, None).max_tokens
        _check_length(fixed, hole, longest, f"max_tokens={hole}")
        places = (*before, *[OPEN] * hole, *behind)
        template = Template(places, (Hole(len(before), len(before) + hole),), fill_only=True)
    else:
        return resolve(own, prompt, None), None
    params = resolve({**own, "max_tokens": len(template)}, prompt, template)
    return params, template if params.ignore_eos else replace(template, padding=tuple(stop_ids))


def template_of(parts: Sequence[Part], tokenizer: Tokenizer | None, *, control_tokens: bool = False) -> Template:
    """The template of parts; names of special tokens in their texts are text, or with `control_tokens` tokens.

    Raises `ConfigError` on texts where there is no tokenizer, and where no part is a hole.
    """
    tokens: list[int] = []
    holes: list[Hole] = []
    for part in parts:
        if isinstance(part.mask, MaskLength) and part.mask.max is not None:
            start = len(tokens)
            tokens += [OPEN] * part.mask.max
            holes.append(Hole(start, len(tokens), part.mask.min))
        else:
            tokens += part.token_ids or () if part.text is None else _encoded(part.text, tokenizer, control_tokens)
    if not holes:
        raise ConfigError("canvas has no hole, so there is nothing to generate; give a part with mask")
    return Template(tuple(tokens), tuple(holes))


def _check_length(fixed: int, holes: int, longest: int, response: str) -> None:
    if fixed + holes > longest:
        raise CanvasLengthError(
            f"{fixed} given tokens and {response} make a canvas of {fixed + holes}, but max_model_len is "
            f"{longest}; shorten one of them",
            fixed,
            holes,
        )


def _encoded(text: str, tokenizer: Tokenizer | None, control_tokens: bool) -> list[int]:
    """Tokens of a text that stands within others, so that the tokenizer puts nothing around it."""
    if tokenizer is None:
        raise ConfigError("canvas: this model folder has no tokenizer, so fixed parts must be token_ids")
    return (tokenizer.encode if control_tokens else tokenizer.encode_literally)(text, add_special_tokens=False)
