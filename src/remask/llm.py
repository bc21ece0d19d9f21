"""`LLM`: one object with a model, its engine and its depth table."""

import logging
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Unpack

from remask.checkpoint.loaded import FoundModel, LoadedModel, find_model
from remask.checkpoint.settings import Loading, LoadSettings, ModelSettings
from remask.checks import ModelKind
from remask.checks.fields import declared
from remask.checks.values import shown
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
from remask.request.questions import Decisions
from remask.request.result import Usage
from remask.request.terms import Part
from remask.session import NO_DEPTHS, Canvas, RequestKeywords, Sampling, Session, check_idle, events_of
from remask.text.prompts import Message, Prompt, as_prompts, conversations
from remask.text.tokenizer import Tokenizer

__all__ = ["LLM", "Canvas", "Decided", "Output", "Sampling", "StreamedOutput"]

log = logging.getLogger(__name__)

_ANNOUNCED_PARAMETERS = 20_000_000
"""Loading a model of at least this many weights is announced on stderr, as it takes noticeable time."""

_BEST_CACHE: Mapping[ModelKind, str] = {"masked": "bicache", "block_causal": "exact", "uniform": "none"}


class LLM:
    """Generates with one diffusion language model.

    Args:
        model: a local folder in the Hugging Face layout, a GGUF file, a hub id, `id:file.gguf`, the folder of an
            adapter that names its base, `smollm2`, `smollm2-blocks`, `bundled`, `bundled-tariff`, `bundled-transit`,
            `bundled-uniform`, a name of the shelf (`remask models` lists them), or with `load_format="dummy"` a preset.
        cache: the name of a cache policy, a composition such as `bicache+block-dual`, `FILE.py:CLASS` (a policy in a
            file, which is run), or a `CachePolicy` object; each call of `generate` may name another. `auto` suits the
            model: `bicache` at the depth that audits earn on masked models, `exact` on block-causal ones, else `none`.
            Commands and servers have the same default.
        cache_config: settings of a named policy; an object has its own.
        depth_table: a file written by `remask profile`, whose depths `bicache` uses. Without one audits earn the
            depths: they begin with a shipped table and the depths that earlier starts have saved, or with "none" at 0.
        engine: limits of the engine.
        loading: settings of `LoadSettings` by name, such as `dtype`, `device`, `quantization` or `adapter`.

    Raises `ConfigError` on settings, `CheckpointError` on model files and `TableError` on a depth table that cannot be
    used.

    Attributes:
        session: makes and runs requests, for servers and measurements.
        refused_adapters: the reason why an adapter is left out, by its name.
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
        cpu_reading = read_cpu()
        resolved_device = resolve_device(settings.device)
        # What can be refused without the weights is refused before they are read, which may take minutes.
        limits = engine or EngineConfig()
        announce_download(settings, resolved_device, limits)
        checkpoint = find_model(settings)
        if settings.progress and checkpoint.config.parameters >= _ANNOUNCED_PARAMETERS:
            print(f"remask: loading {model}", file=sys.stderr, flush=True)
        self.refused_adapters = checkpoint.refusals
        default_cache = checkpoint.default_names.get("cache", _BEST_CACHE[checkpoint.config.kind])
        policy, policy_settings = from_file(default_cache if cache == AUTO else cache, cache_config)
        parse(policy, policy_settings, lambda: DepthLookup({}))
        Shard(0, settings.tensor_parallel).check(checkpoint.config)
        if limits.batch_invariant:
            check_ranks(settings.tensor_parallel)
        opened = open_model(checkpoint, resolved_device, limits, cpu_reading)
        loaded = opened.loaded
        ranks = opened.ranks
        try:
            # An unusable file raises here, not when a policy first needs it.
            table: DepthTable | Literal["none"] | None = None
            if depth_table is not None:
                table = NO_DEPTHS if depth_table == NO_DEPTHS else DepthTable.load(depth_table, loaded)
            transformer = Transformer(loaded.config, loaded.weights, ranks=ranks)
            self.session = Session(
                loaded,
                transformer,
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
        _log_adapters(checkpoint)
        log.info(
            "remask: model=%s family=%s parameters=%.3g %s device=%s threads=%d (%s) tensor_parallel=%d %s",
            model,
            loaded.config.family,
            loaded.config.parameters,
            opened.precision,
            resolved_device,
            opened.threads.count,
            opened.threads.reason,
            settings.tensor_parallel,
            self.session.description,
        )
        log.debug("remask: %s", limits)

    def close(self) -> None:
        """End the other processes of a model with `tensor_parallel`, which cannot compute afterwards.

        The end of a `with` block calls it.
        """
        self.model.ranks.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
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
        """The depth table of the model: the argument, one saved by `remask profile`, or a shipped one; None without."""
        return self.session.depth_table_of(None)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Sampling | Sequence[Sampling] | None = None,
        *,
        trace: bool = False,
        readers: Sequence[Reader] = (),
        **keywords: Unpack[RequestKeywords],
    ) -> list[Output]:
        """Answer prompts, batched together, in their order.

        A prompt is text, token ids, chat messages, or as in vLLM an object: `{"prompt": ...}` or `{"prompt_token_ids":
        [...]}`. `params`, for all prompts or one for each, are complete as `SamplingParams`; a mapping such as
        `{"temperature": 0.5}`, or None, leaves the rest to the checkpoint's defaults, as `Session.params` resolves
        them. The results of `readers` are in `Output.reads`, by their names. `keywords` are the fields of
        `remask.request.terms.Terms`, for all prompts; `cache` may be an object, too, as in `LLM`. With `trace` outputs
        have what each step wrote, with `top_logprobs` log-probabilities. Raises `ConfigError`, before anything runs, if
        a prompt or a setting cannot be used.
        """
        terms_and_policy = self.session.terms(keywords, LLM.generate)
        return self._run(self.session.requests(prompts, params, *terms_and_policy, readers=readers), trace)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Sampling | Sequence[Sampling] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        trace: bool = False,
        readers: Sequence[Reader] = (),
        **keywords: Unpack[RequestKeywords],
    ) -> list[Output]:
        """Answer a conversation, or several of them batched together, in their order.

        As `generate` with conversations: a list of messages, or a list of such lists. With `continue_final_message`,
        which as in vLLM needs `add_generation_prompt` to be false, the last message is the beginning of the answer, and
        outputs are what follows it; a form is that of both together. `chat_template_kwargs` are variables of the chat
        template, such as `tools`.
        """
        requests = self.session.requests(
            conversations(messages),
            params,
            *self.session.terms(keywords, LLM.chat),
            readers=readers,
            variables=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self._run(requests, trace)

    def stream(
        self, prompt: Prompt, params: Sampling | None = None, **keywords: Unpack[RequestKeywords]
    ) -> Generator[StreamedOutput, None, None]:
        """Answer one prompt, and yield its text as it settles, left to right.

        The arguments are those of `generate`. Only the last piece has an `output`. A consumer that stops early cancels
        the request. For many prompts at a time use `AsyncLLM`. Raises `ConfigError`, when the first piece is read, if
        the prompt or a setting cannot be used or the engine is not idle.
        """
        check_idle(self.engine)
        request = self.session.stream_request(prompt, params, **keywords)
        collector = self.session.collector(self.engine.check(request))
        with closing(events_of([request], self.engine)) as steps:
            for events in steps:
                yield from self.session.collect(collector, events)

    def infill(
        self,
        prompts: Prompt | Sequence[Prompt],
        canvas: Canvas | Sequence[Canvas],
        params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        *,
        trace: bool = False,
        readers: Sequence[Reader] = (),
        **keywords: Unpack[RequestKeywords],
    ) -> list[Output]:
        """Fill the holes of responses with fixed parts, batched together, in the order of the prompts.

        `canvas` is a list of parts, for all prompts or one for each: `{"text": ...}` and `{"token_ids": [...]}` are
        fixed parts, `{"mask": n}` is a hole of n tokens, and `{"mask": {"min": a, "max": b}}` one of a to b tokens. The
        parts determine the length of the response, so `params` are mappings without `max_tokens`. Outputs have the text
        of each hole in `holes`, and all of the response in `text`. All else is as in `generate`.
        """
        items = as_prompts(prompts)
        terms_and_policy = self.session.terms(keywords, LLM.infill)
        if isinstance(canvas, str) or not isinstance(canvas, Sequence):
            raise ConfigError(
                'canvas must be a list of parts, such as [{"text": "a"}, {"mask": 4}], or a list of such lists, one '
                f"per prompt, got {shown(canvas)}"
            )
        is_single_canvas = bool(canvas) and isinstance(canvas[0], Mapping | Part)
        canvases: Any = [canvas] * len(items) if is_single_canvas else list(canvas)
        return self._run(
            self.session.requests(items, params, *terms_and_policy, canvases=canvases, readers=readers), trace
        )

    def _run(self, requests: Sequence[Request], trace: bool) -> list[Output]:
        """Run `requests`, and return their outputs in the same order."""
        outputs = {output.id: output for output in self.session.run(requests, trace=trace)}
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
        """Answer questions about one state by the model's distribution over a few labels each; nothing is generated.

        The arguments are the fields of `docs/decisions.md`: a `state` with questions by their ids, as in System One, or
        an `input` with a list of questions, as in OpenAI's API; the ids are then the indices, from "0". A question that
        shows an image has no answer. A `Decisions` object as `state` replaces all of these fields.

        Each question is a canvas of its own and takes one pass, in one batch over the state as shared prefix; labels of
        several tokens take a pass for each beginning of a label, in the same batch. `cache`, `cache_config` and
        `adapter` are as in `generate`. Raises `ConfigError`, before anything runs, if a question cannot be answered,
        and `DecisionError` if its pass failed.
        """
        decisions = state
        if not isinstance(decisions, Decisions):
            fields = {"input": input, "together": together, "calibrate": calibrate, "end_turn": end_turn}
            decisions = Decisions(state, questions, **fields)  # type: ignore[arg-type]
        plan = self.session.plan_decisions(decisions)
        policy = self.session.policy_of_arguments(cache, cache_config, adapter)
        requests = [plan.request(i, str(i), policy=policy, adapter=adapter) for i in range(len(plan.asks))]
        outputs = self._run(requests, trace=False)
        error = next((output.error for output in outputs if output.error is not None), None)
        if error is not None:
            raise DecisionError(f"a question could not be read: {error}")
        answers = plan.answers([output.reads[Reading.name] for output in outputs])
        return Decided(answers, Usage.total([output.usage for output in outputs]))


def _log_adapters(checkpoint: FoundModel) -> None:
    """Log the adapters of a model, and why others are left out."""
    if checkpoint.adapter is not None:
        log.info("remask: merged adapter %s", checkpoint.adapter.facts)
    for name, adapter in checkpoint.adapters.items():
        log.info("remask: adapter %r: %s", name, adapter.facts)
    for name, reason in checkpoint.refusals.items():
        log.error("remask: the adapter %r is left out: %s", name, reason)
