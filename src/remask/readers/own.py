"""The readers of a request that begins: those that it brings, and those that its parameters need."""

from collections.abc import Iterator

from remask.policies.base import CachePolicy
from remask.readers.base import Reader, Start
from remask.readers.biases import biases_of
from remask.readers.entropy import Entropy
from remask.readers.guidance import Guidance
from remask.readers.padding import Padding
from remask.readers.proposals import Proposals
from remask.request.sampling_params import SamplingParams
from remask.sampling.decoder import Decoder


def readers_of(start: Start, decoder: Decoder, policy: CachePolicy, params: SamplingParams) -> tuple[Reader, ...]:
    """The readers at work on a request that begins, under this policy and with these sampling parameters."""
    started = (reader.start(start) for reader in start.readers)
    return (*_implied(start, decoder, policy, params), *(each for each in started if each is not None))


def _implied(start: Start, decoder: Decoder, policy: CachePolicy, params: SamplingParams) -> Iterator[Reader]:
    if decoder.corrections is not None:
        yield Proposals()
    if policy.traits.reads == "entropy":
        yield Entropy()
    padding = Padding.of(start.response, start.canvas)
    if padding is not None:
        yield padding
    if params.cfg_scale > 0:
        yield Guidance(params.cfg_scale)
    yield from biases_of(params, start.canvas)
