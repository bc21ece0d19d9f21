"""`LLM`: one object with a model, its engine and its depth table."""

import logging
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Never, Unpack

from remask.checkpoint.loaded import LoadedModel, find_model
from remask.checkpoint.settings import Loading, LoadSettings, ModelSettings
from remask.checks import ModelKind
from remask.checks.fields import declared
from remask.depth.table import DepthTable
from remask.engine.config import AUTO, EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError, DecisionError, UnknownNameError
from remask.loading import announce_download, open_model
from remask.machine.cpu import read_cpu
from remask.machine.device import resolve_device
from remask.model.invariant import check_ranks
from remask.model.ranks import Shard
from remask.model.transformer import Transformer
from remask.outputs import Decided, Output, StreamedOutput
from remask.policies import CachePolicy, parse
from remask.policies.bicache import DepthLookup
from remask.policies.registry import from_file
from remask.readers.base import Reader
from remask.readers.decision import Reading
from remask.readers.logprobs import Logprobs
from remask.request.forms import StructuredOutputs
from remask.request.parts import Part
from remask.request.questions import Decisions
from remask.request.result import Usage
from remask.request.terms import Terms
from remask.session import NO_DEPTHS, Canvas, Sampling, Session, check_idle, events_of
from remask.text.prompts import Message, Prompt, as_prompts, conversations, encode
from remask.text.tokenizer import Tokenizer

__all__ = ["LLM", "Canvas", "Decided", "Output", "Sampling", "StreamedOutput"]

log = logging.getLogger(__name__)

_TOLD = 20_000_000
"""Parameters from which on loading is told: fewer are loaded in no time."""

_BEST_CACHE: Mapping[ModelKind, str] = {"masked": "bicache", "block_causal": "exact", "uniform": "none"}


class LLM:
    """Generates with one diffusion language model.

    Args:
        model: a local folder in the Hugging Face layout, a GGUF file, a hub id, `id:file.gguf`, the folder of an
            adapter that names its base, `smollm2`, `bundled`, `bundled-tariff`, `bundled-transit`, `bundled-uniform`,
            a name of the shelf (`remask models` lists them), or with `load_format="dummy"` a preset.
        cache: the name of a cache policy, a composition such as `bicache+block-dual`, `FILE.py:CLASS` (a policy in a
            file, which is run), or a `CachePolicy` object; each call of `generate` may give another. `auto` is what
            suits the model: `bicache` at the depth that audits earn on masked models, `exact` on block-causal ones, and
            else `none`. Commands and servers have the same default.
        cache_config: settings of a policy that is named; an object has its own.
        depth_table: a file written by `remask profile`, whose depths are read as they are. Without one audits earn the
            depths of `bicache`: they begin with a table that is shipped and with what earlier starts have kept, or
            with "none" at 0.
        engine: limits of the engine.
        loading: how the model is loaded: the settings of `LoadSettings` by name, such as `dtype`, `device`,
            `quantization` or `adapter`.

    Raises `ConfigError` on settings, `CheckpointError` on model files and `TableError` on a depth table that cannot be
    used.

    Attributes:
        session: what requests are made of, for servers and measurements.
        refused_adapters: why adapters were left out, by name.
    """

    def __init__(
        self,
        model: str,
        *,
        cache: str | CachePolicy = AUTO,
        cache_config: Mapping[str, Any] | None = None,
        depth_table: str | Path | None = None,
        engine: EngineConfig | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        for name in loading:
            if name not in declared(LoadSettings):
                raise UnknownNameError("argument", name, [*declared(LoadSettings), *signature(LLM).parameters])
        settings = ModelSettings(model, **loading)
        before = read_cpu()
        place = resolve_device(settings.device)
        # Whatever can be refused without the weights is, as reading these may take minutes.
        limits = engine or EngineConfig()
        announce_download(settings, place, limits)
        found = find_model(settings)
        if settings.progress and found.config.parameters >= _TOLD:
            print(f"remask: loading {model}", file=sys.stderr, flush=True)
        self.refused_adapters = found.refused
        usual = found.usual.get("cache", _BEST_CACHE[found.config.kind]) if cache == AUTO else cache
        policy, policy_settings = from_file(usual, cache_config)
        parse(policy, policy_settings, lambda: DepthLookup({}))
        Shard(0, settings.tensor_parallel).check(found.config)
        if limits.batch_invariant:
            check_ranks(settings.tensor_parallel)
        opened = open_model(found, place, limits, before)
        loaded, ranks = opened.loaded, opened.ranks
        try:
            # A file that cannot be used fails now, not when a policy first needs it.
            table: DepthTable | Literal["none"] | None = None
            if depth_table is not None:
                table = NO_DEPTHS if depth_table == NO_DEPTHS else DepthTable.load(depth_table, loaded)
            computed = Transformer(loaded.config, loaded.weights, ranks=ranks)
            self.session = Session(
                loaded,
                computed,
                limits,
                policy,
                policy_settings,
                auto=cache == AUTO,
                depth_table=table,
                progress=settings.progress,
            )
        except BaseException:
            ranks.close()
            raise
        if found.adapter is not None:
            log.info("remask: merged adapter %s", found.adapter.facts)
        for name, own in found.adapters.items():
            log.info("remask: adapter %r: %s", name, own.facts)
        for name, why in found.refused.items():
            log.error("remask: the adapter %r is left out: %s", name, why)
        log.info(
            "remask: model=%s family=%s parameters=%.3g %s device=%s threads=%d (%s) tensor_parallel=%d %s",
            model,
            loaded.config.family,
            loaded.config.parameters,
            opened.numbers,
            place,
            opened.threads.number,
            opened.threads.why,
            settings.tensor_parallel,
            self.session.described,
        )
        log.debug("remask: %s", limits)

    def close(self) -> None:
        """End the other processes of a model with `tensor_parallel`, which cannot compute afterwards.

        A `with` block does so at its end.
        """
        self.model.ranks.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model folder's tokenizer, if it has one."""
        return self.session.tokenizer

    @property
    def loaded(self) -> LoadedModel:
        """The model's configuration, weights and texts."""
        return self.session.loaded

    @property
    def model(self) -> Transformer:
        """The model, as the engine computes it."""
        return self.session.model

    @property
    def engine(self) -> Engine:
        """The engine that answers."""
        return self.session.engine

    @property
    def depth_table(self) -> DepthTable | None:
        """The model's depth table: given, kept by `remask profile`, or shipped; None without one."""
        return self.session.depth_table_of(None)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Sampling | Sequence[Sampling] | None = None,
        *,
        prefix_length: int | None = None,
        cache: str | CachePolicy | None = None,
        cache_config: Mapping[str, Any] | None = None,
        trace: bool = False,
        top_logprobs: int | None = None,
        structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None,
        readers: Sequence[Reader] = (),
        control_tokens: bool | None = None,
        adapter: str | None = None,
        **unknown: Never,
    ) -> list[Output]:
        """Answer prompts, batched together, in their order.

        A prompt is text, token ids, chat messages, or as in vLLM an object: `{"prompt": ...}` or `{"prompt_token_ids":
        [...]}`. `prefix_length` leading tokens are shared with other requests;
        by default everything before the last user turn with messages, and nothing with text or token ids. `params` as
        `SamplingParams` are complete; a mapping such as `{"temperature": 0.5}`, or None, leaves the rest to the
        checkpoint's own defaults, as `Session.params` resolves them. `cache` and
        `cache_config` are as in `LLM`; without `cache` the default policy runs. With `top_logprobs` outputs have the
        log-probability of each token, and of so many of the most probable ones in the same step. `structured_outputs`
        is the form of all answers, as in `docs/sampling.md`. What `readers` of one's own find in each step is in
        `Output.reads`, by their names. Names of special tokens become these tokens in prompts
        that are text, and not in chat messages; `control_tokens` says that they do in both, or in neither. `adapter`
        is the name of one of the `adapters` of `LLM`. Raises `ConfigError`, before anything runs, where a prompt or a
        setting cannot be used.
        """
        for name in unknown:
            raise UnknownNameError("argument", name, signature(LLM.generate).parameters.keys() - {"self", "unknown"})
        requests = self.session.requests(
            prompts,
            params,
            prefix_length=prefix_length,
            policy=self.session.chosen_policy(cache, cache_config, adapter),
            control_tokens=control_tokens,
            adapter=adapter,
        )
        return self._answered(requests, trace, top_logprobs, structured_outputs, readers)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Sampling | Sequence[Sampling] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache: str | CachePolicy | None = None,
        cache_config: Mapping[str, Any] | None = None,
        trace: bool = False,
        top_logprobs: int | None = None,
        structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None,
        readers: Sequence[Reader] = (),
        control_tokens: bool | None = None,
        adapter: str | None = None,
    ) -> list[Output]:
        """Answer a conversation, or several of them batched together, in their order.

        As `generate` with conversations: a list of messages, or a list of such lists. With `continue_final_message`,
        which as in vLLM needs `add_generation_prompt` to be false, the last message is the beginning of the answer, and
        outputs are what follows it; a form is that of both together. `chat_template_kwargs` are
        variables of the chat template, such as `tools`. Raises `ConfigError`, before anything runs, where a
        conversation or a setting cannot be used.
        """
        asked = conversations(messages)
        requests = self.session.requests(
            asked,
            params,
            policy=self.session.chosen_policy(cache, cache_config, adapter),
            control_tokens=control_tokens,
            adapter=adapter,
            variables=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        given = [each[-1]["content"] for each in asked] if continue_final_message else None
        return self._answered(requests, trace, top_logprobs, structured_outputs, readers, given)

    def stream(
        self,
        prompt: Prompt,
        params: Sampling | None = None,
        *,
        cache: str | CachePolicy | None = None,
        cache_config: Mapping[str, Any] | None = None,
        structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None,
        control_tokens: bool | None = None,
        adapter: str | None = None,
    ) -> Generator[StreamedOutput, None, None]:
        """Answer one prompt, and yield its text as it settles, left to right.

        The arguments are those of `generate`. The last item alone has an `output`. A consumer that stops early cancels
        the request. Many prompts at a time are `AsyncLLM`'s. Raises `ConfigError`, with the first item, where something
        cannot be used.
        """
        check_idle(self.engine)
        request = self.session.streamed(
            prompt, params, cache, cache_config, structured_outputs, control_tokens, adapter
        )
        answer = self.session.answer(self.engine.check(request))
        with closing(events_of([request], self.engine)) as steps:
            for events in steps:
                yield from self.session.pieces(answer, events)

    def infill(
        self,
        prompts: Prompt | Sequence[Prompt],
        canvas: Canvas | Sequence[Canvas],
        params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        *,
        prefix_length: int | None = None,
        cache: str | CachePolicy | None = None,
        cache_config: Mapping[str, Any] | None = None,
        trace: bool = False,
        top_logprobs: int | None = None,
        structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None,
        control_tokens: bool | None = None,
        adapter: str | None = None,
    ) -> list[Output]:
        """Fill the holes of responses with fixed parts, batched together, in the order of the prompts.

        `canvas` is a list of parts, for all prompts or one for each: `{"text": ...}` and `{"token_ids": [...]}` stand
        as they are, `{"mask": n}` is a hole of n tokens, and `{"mask": {"min": a, "max": b}}` one of a to b tokens.
        Its parts say how long a response is, so `params` are mappings without `max_tokens`. Outputs have the text of
        each hole in `holes`, and all of the response in `text`. `structured_outputs` is the form of a canvas' one hole.
        All else is as in `generate`. Raises `ConfigError`, before anything runs, where something cannot be used.
        """
        items = as_prompts(prompts)
        canvases = [canvas] * len(items) if canvas and isinstance(canvas[0], Mapping | Part) else list(canvas)
        each = list(params) if isinstance(params, Sequence) else [params] * len(items)
        for name, given in (("canvas", canvases), ("params", each)):
            if len(given) != len(items):
                raise ConfigError(f"{name}: one for all prompts or one per prompt ({len(items)}), got {len(given)}")
        policy, requests = self.session.chosen_policy(cache, cache_config, adapter), []
        for index, (prompt, parts, own) in enumerate(zip(items, canvases, each, strict=True)):
            tokens, shared = encode(prompt, self.tokenizer, control_tokens)
            length = shared if prefix_length is None else prefix_length
            terms = Terms(canvas=parts, control_tokens=control_tokens)  # type: ignore[arg-type]
            chosen, template = self.session.response(terms, own or {}, len(tokens))
            requests.append(Request(str(index), tokens, chosen, length, policy, template=template, adapter=adapter))
        return self._answered(requests, trace, top_logprobs, structured_outputs)

    def _answered(
        self,
        requests: Sequence[Request],
        trace: bool,
        top_logprobs: int | None,
        form: StructuredOutputs | Mapping[str, Any] | None,
        readers: Sequence[Reader] = (),
        given: Sequence[str] | None = None,
    ) -> list[Output]:
        """Run `requests` under these terms. Returns their outputs in their order.

        The prompt of each ends with a text that is `given`, if they continue any.
        """
        logprobs = None if top_logprobs is None else Logprobs(top_logprobs)
        asked = [
            each.with_readers(logprobs, self.session.constraint(form, text), *readers)
            for each, text in zip(requests, given or [""] * len(requests), strict=True)
        ]
        outputs = {output.id: output for output in self.session.run(asked, trace=trace)}
        return [outputs[request.id] for request in requests]

    def decide(
        self,
        state: str | Mapping[str, Any] | Sequence[Any] | Decisions = "",
        questions: Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        input: str | Sequence[Mapping[str, Any]] | None = None,
        together: bool = False,
        calibrate: bool = False,
        end_turn: bool = True,
        cache: str | CachePolicy | None = None,
        cache_config: Mapping[str, Any] | None = None,
        adapter: str | None = None,
    ) -> Decided:
        """Answer questions over one state by the model's distribution over a few labels each; nothing is generated.

        The fields are those of `docs/decisions.md`: a `state` with questions by their ids, as System One has them, or
        an `input` with a list of questions, as OpenAI's API has them; the answers of a list have their places in it,
        from "0", as ids, and a question that shows an image has no answer. `Decisions` in place of the state are all of
        that. Each question is a canvas of its own, all of
        them in one batch over the state as their shared prefix, and takes one pass; with labels of several tokens, one
        for each beginning of a label, in the same batch. `cache`, `cache_config` and `adapter` are as in `generate`.
        Raises `ConfigError`, before anything runs, where a question cannot be asked.
        """
        asked = state
        if not isinstance(asked, Decisions):
            fields = {"input": input, "together": together, "calibrate": calibrate, "end_turn": end_turn}
            asked = Decisions(state, questions, **fields)  # type: ignore[arg-type]
        plan = self.session.decisions(asked)
        policy = self.session.chosen_policy(cache, cache_config, adapter)
        numbers = range(len(plan.asks))
        requests = [plan.request(number, str(number), policy=policy, adapter=adapter) for number in numbers]
        outputs = {output.id: output for output in self.session.run(requests)}
        ordered = [outputs[str(number)] for number in range(len(plan.asks))]
        failed = next((output.error for output in ordered if output.error is not None), None)
        if failed is not None:
            raise DecisionError(f"a question could not be read: {failed}")
        return Decided(
            plan.answers([output.reads[Reading.name] for output in ordered]), Usage.total([o.usage for o in ordered])
        )
