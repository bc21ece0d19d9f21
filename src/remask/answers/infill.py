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
"""Returns the sampling parameters of a request from those that it sets, its number of given tokens and its template."""


def response_of(
    terms: Terms,
    sampling: Mapping[str, Any],
    prompt_length: int,
    *,
    tokenizer: Tokenizer | None,
    stop_ids: Sequence[int],
    resolve: Resolve,
    max_length: int,
    affixes: tuple[str, str] | None = None,
) -> tuple[SamplingParams, Template | None]:
    """Return the sampling parameters of a request and the template of its response, None if all of it is one hole.

    `sampling` are the parameters that the request sets, `stop_ids` the model's end tokens, which pad holes. `affixes`
    are texts before and behind a hole of `max_tokens`; they may name special tokens, and the answer does not show them.
    A `suffix` of the request replaces the second of them, and the first is empty then. Raises `ConfigError` if parts
    and parameters contradict each other or cannot be met, and `CanvasLengthError` on a canvas of more than `max_length`
    positions, before a template of that length is built.
    """
    control_tokens = terms.control_tokens is True
    if terms.canvas is not None:
        if sampling.get("max_tokens") is not None:
            raise ConfigError("max_tokens: the parts of a canvas say how long the response is; leave it out")
        hole_length = sum(part.mask.max or 0 for part in terms.canvas if isinstance(part.mask, MaskLength))
        _check_length(prompt_length, hole_length, max_length, f"holes of {hole_length}")
        template = template_of(terms.canvas, tokenizer, control_tokens=control_tokens)
    elif terms.suffix is not None or affixes is not None:
        texts = affixes if terms.suffix is None else ("", terms.suffix)
        assert texts is not None
        # A suffix comes from the client, other affixes from the server.
        may_name_tokens = control_tokens or terms.suffix is None
        if tokenizer is None:
            raise ConfigError(
                "suffix: this model folder has no tokenizer, so text cannot follow the response; send a canvas of "
                "token_ids and a mask"
            )
        head, tail = (_encode_part(text, tokenizer, may_name_tokens) for text in texts)
        fixed_length = prompt_length + len(head) + len(tail)
        hole_length = resolve(sampling, fixed_length, None).max_tokens
        _check_length(fixed_length, hole_length, max_length, f"max_tokens={hole_length}")
        hole = Hole(len(head), len(head) + hole_length)
        template = Template((*head, *[OPEN] * hole_length, *tail), (hole,), fill_only=True)
    else:
        return resolve(sampling, prompt_length, None), None
    params = resolve({**sampling, "max_tokens": len(template)}, prompt_length, template)
    return params, template if params.ignore_eos else replace(template, padding=tuple(stop_ids))


def template_of(parts: Sequence[Part], tokenizer: Tokenizer | None, *, control_tokens: bool = False) -> Template:
    """The template of a response made of `parts`. Names of special tokens in texts are tokens with `control_tokens`.

    Raises `ConfigError` if there is a text and no tokenizer, and if no part is a hole.
    """
    tokens: list[int] = []
    holes: list[Hole] = []
    for part in parts:
        if isinstance(part.mask, MaskLength) and part.mask.max is not None:
            start = len(tokens)
            tokens += [OPEN] * part.mask.max
            holes.append(Hole(start, len(tokens), part.mask.min))
        else:
            tokens += part.token_ids or () if part.text is None else _encode_part(part.text, tokenizer, control_tokens)
    if not holes:
        raise ConfigError("canvas has no hole, so there is nothing to generate; give a part with mask")
    return Template(tuple(tokens), tuple(holes))


def _check_length(fixed_length: int, hole_length: int, max_length: int, holes: str) -> None:
    """Raise `CanvasLengthError` if the canvas is longer than `max_length`. `holes` names its holes in the error."""
    length = fixed_length + hole_length
    if length > max_length:
        raise CanvasLengthError(
            f"{fixed_length} given tokens and {holes}",
            f" make a canvas of {length}, but max_model_len is {max_length}; shorten one of them",
            fixed_length,
            hole_length,
        )


def _encode_part(text: str, tokenizer: Tokenizer | None, control_tokens: bool) -> list[int]:
    """Token ids of a text within others, without the special tokens that begin and end a prompt."""
    if tokenizer is None:
        raise ConfigError("canvas: this model folder has no tokenizer, so fixed parts must be token_ids")
    encode = tokenizer.encode if control_tokens else tokenizer.encode_literally
    return encode(text, add_special_tokens=False)
