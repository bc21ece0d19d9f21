"""The engine as a model of lm-eval, in the same process."""

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import LM

from remask.engine.request import Request
from remask.errors import ConfigError, UnknownNameError
from remask.llm import LLM
from remask.policies import CachePolicy
from remask.text.prompts import Message
from remask_lab.harness.generation import Generation, generate, sampling_of
from remask_lab.likelihood.estimator import LikelihoodEstimator
from remask_lab.likelihood.pairs import Pair, encode_pair

_MAX_TOKENS = 256  # where a task gives no length
_GENERATION = ("until", "max_gen_toks", "max_tokens", "do_sample", "temperature", "top_p", "top_k")


class RemaskLM(LM):
    """Answers lm-eval's requests with one model.

    `generate_until` runs all requests batched, under one cache policy. The part of a chat before its last user turn is
    the shared prefix. `loglikelihood` returns a Monte-Carlo estimate, which uses no cache.

    Args:
        llm: the model.
        policy: the cache policy of generation.
        sampling: sampling parameters, which override those of a task.
        seed: request i of a task has the seed `seed` + i, unless `sampling` has one.
        estimator: estimates likelihoods. None refuses tasks that need them.
        examples: earlier turns that every chat gets before its last message, and shares.
    """

    def __init__(
        self,
        llm: LLM,
        policy: CachePolicy,
        sampling: Mapping[str, Any],
        seed: int = 0,
        estimator: LikelihoodEstimator | None = None,
        examples: Sequence[Message] = (),
    ) -> None:
        super().__init__()
        if llm.tokenizer is None:
            raise ConfigError("this model folder has no tokenizer, and lm-eval's tasks are text; give a model with one")
        self._llm, self._policy, self._sampling, self._seed = llm, policy, sampling, seed
        self._tokenizer, self._estimator, self._examples = llm.tokenizer, estimator, examples
        self._shared: dict[str, int] = {}  # shared tokens of every rendered chat
        self.generation: Generation | None = None  # of the last `generate_until`
        self.standard_errors: list[float] = []  # of the last log-likelihoods, in nats

    @property
    def tokenizer_name(self) -> str:
        """The model's name, which identifies its tokenizer and chat template in lm-eval's request cache."""
        return self._llm.loaded.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        """Render the chat, with the examples, by the model's template.

        Without a generation prompt its last message is continued.
        """
        chat_history = [*chat_history[:-1], *self._examples, chat_history[-1]]
        if add_generation_prompt:
            text = self._tokenizer.render_chat(chat_history)
        else:
            text = self._tokenizer.render_chat(chat_history[:-1]) + chat_history[-1]["content"]
        self._shared[text] = self._tokenizer.shared_prefix(chat_history)
        return text

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Returns one response a request, up to the first of its stop texts."""
        work = [self._request(str(number), *request.args) for number, request in enumerate(requests)]
        self.generation = generate(self._llm, work, self._policy, self._seed, self._llm.progress)
        return [output.text or "" for output in self.generation.outputs]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Returns the estimated log-likelihood of each continuation, and whether greedy decoding would give it.

        Continuations of one document get the same masks.
        """
        estimator = self._likelihoods()
        pairs = [self._pair(*request.args) for request in requests]
        groups = [request.doc_id or 0 for request in requests]
        found = estimator.score(pairs, groups, self._llm.progress)
        self.standard_errors = [each.standard_error for each in found]
        greedy = estimator.are_greedy(pairs)
        return [(each.log_likelihood, same) for each, same in zip(found, greedy, strict=True)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Returns the estimated log-likelihood of whole texts.

        A text that is longer than the model's limit is cut into parts of half the limit. Each is scored after the part
        before it.
        """
        estimator, half = self._likelihoods(), self._llm.model.config.max_length // 2
        pairs, owner = [], []
        for number, request in enumerate(requests):
            tokens = self._tokenizer.encode(request.args[0], add_special_tokens=False)
            cuts = [0, *range(half, len(tokens), half)] if len(tokens) > 2 * half else [0]
            for at in cuts:
                stop = at + half if len(cuts) > 1 else len(tokens)
                pairs.append(Pair(tokens[max(0, at - half) : at], tokens[at:stop]))
                owner.append(number)
        sums = [0.0] * len(requests)
        for number, found in zip(owner, estimator.score(pairs, range(len(pairs)), self._llm.progress), strict=True):
            sums[number] += found.log_likelihood
        return sums

    def _request(self, identity: str, context: str, asked: Mapping[str, Any]) -> Request:
        for name in asked:
            if name not in _GENERATION:
                raise UnknownNameError("generation parameter", name, _GENERATION)
        until = asked.get("until") or ()
        stop = [text for text in ([until] if isinstance(until, str) else until) if text]
        own: dict[str, Any] = {}
        if asked.get("do_sample") or asked.get("temperature"):
            own = {name: asked[name] for name in ("temperature", "top_p", "top_k") if asked.get(name) is not None}
        length = asked.get("max_gen_toks") or asked.get("max_tokens") or _MAX_TOKENS
        params = sampling_of(self._llm, {**own, **self._sampling}, length, stop)
        # A chat template writes the special tokens itself.
        shared = self._shared.get(context)
        tokens = self._tokenizer.encode(context, add_special_tokens=shared is None)
        return Request(identity, tokens, params, shared or 0)

    def _pair(self, context: str, continuation: str) -> Pair:
        if context in self._shared:
            encode = self._tokenizer.encode
            return Pair(encode(context, add_special_tokens=False), encode(continuation, add_special_tokens=False))
        return encode_pair(self._llm, context, continuation)

    def _likelihoods(self) -> LikelihoodEstimator:
        if self._estimator is None:
            raise ConfigError(
                f"the task needs log-likelihoods, which are estimated for masked and uniform models; "
                f"{self._llm.loaded.name!r} is a {self._llm.loaded.config.kind} one"
            )
        return self._estimator
