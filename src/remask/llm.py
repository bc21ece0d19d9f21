"""`LLM`: one object with a model, its engine and its depth table."""

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

from tqdm import tqdm

from remask.answers.answer import Answer
from remask.answers.decisions import DecisionPlan, total_usage
from remask.answers.infill import response_of
from remask.answers.structured import Structures
from remask.checkpoint.loaded import find_model
from remask.checks.kinds import ModelKind
from remask.checks.values import one_of, whole
from remask.depth.find import DepthTable, find_table, has_table
from remask.engine.config import AUTO, EngineConfig
from remask.engine.device_defaults import read_defaults
from remask.engine.engine import Engine
from remask.engine.few_bits import Asked
from remask.engine.pending import PendingRequest
from remask.engine.request import Request
from remask.errors import ConfigError, DecisionError
from remask.loading import Loading
from remask.machine.cpu import read_cpu
from remask.machine.device import resolve_device
from remask.model.invariant import check_ranks
from remask.model.ranks import Shard
from remask.model.transformer import Transformer
from remask.outputs import Decided, Output, StreamedOutput
from remask.plan.canvas import Template
from remask.policies import CachePolicy, name_of, parse, settings_of
from remask.policies.depth_lookup import DepthLookup
from remask.readers.base import Reader
from remask.readers.constraint import Constraint
from remask.readers.decision import Reading
from remask.readers.logprobs import Logprobs
from remask.request.forms import StructuredOutputs
from remask.request.holes import Part
from remask.request.questions import Decisions
from remask.request.result import Event
from remask.request.sampling_params import SamplingParams
from remask.request.segments import Segment
from remask.request.terms import Terms
from remask.run_loop import check_idle, events_of
from remask.sampling.defaults import fit, overlaid
from remask.text.prompts import Message, Prompt, as_prompts, conversations, encode
from remask.text.tokenizer import Tokenizer

__all__ = ["LLM", "Canvas", "Decided", "Output", "Sampling", "Segments", "StreamedOutput"]

log = logging.getLogger(__name__)

Sampling: TypeAlias = SamplingParams | Mapping[str, Any]
Canvas: TypeAlias = Sequence[Part | Mapping[str, Any]]
Segments: TypeAlias = Sequence[Segment | Mapping[str, Any]]
_USUAL_CACHE: Mapping[ModelKind, str] = {"masked": "bicache", "block_causal": "exact", "uniform": "none"}


class LLM:
    """Generates with one diffusion language model.

    Args:
        model: a local folder in the Hugging Face layout, a GGUF file, a hub id, `id:file.gguf`, `bundled`,
            `bundled-tariff`, `bundled-transit`, `bundled-uniform`, or with `load_format="dummy"` a preset.
        cache: the name of a cache policy, a composition such as `bicache+block-dual`, or a `CachePolicy` object; each
            call of `generate` may give another. `auto` is what suits the model's kind: `bicache`, `exact` on
            block-causal models, `none` on uniform ones.
        cache_config: settings of a policy that is named; an object has its own.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        device: `auto`, `cpu`, `cuda`, ...
        load_format: `auto` reads a checkpoint, `dummy` makes random weights of a preset's shape.
        check_weights: refuse a checkpoint that holds NaN or infinities, by the name of the tensor.
        depth_table: a file written by `remask profile`; without one a shipped table is used, or the model is profiled
            when BiCache first asks for a depth.
        engine: limits of the engine.
        threads: CPU threads to compute on, for the whole process. Without a number it is chosen by the model's size and
            the cores that are free, unless `OMP_NUM_THREADS` or `torch.set_num_threads` has set one.
        spare_cores: cores that a chosen number leaves to other threads of this process.
        tensor_parallel: processes that compute the model together, each a part of every layer: on CUDA with a device
            each, from `device` on. They end with `close`, with this object, or with this process.
        quantization: `int8` or `int4` on CPUs, `fp8` on CUDA devices that have it: quantized weights, made when the
            weights are read. `auto` is the fastest that fits on a CPU, the dtype included. Hidden states stay of the
            dtype, and K/V too unless it is float32 on a CPU: then they are bfloat16.
        progress: show progress bars on stderr while loading and profiling.

    Raises `ConfigError` on settings, `CheckpointError` on model files and `TableError` on a depth table that cannot be
    used.

    Attributes:
        cache: the default policy, as given; `auto` is resolved to a name.
        cache_name: the default policy's name, for people to read.
        cache_config: the default policy's settings, as given.
    """

    def __init__(
        self,
        model: str,
        *,
        cache: str | CachePolicy = "none",
        cache_config: Mapping[str, Any] | None = None,
        dtype: str = "auto",
        device: str = "auto",
        load_format: str = "auto",
        check_weights: bool = True,
        depth_table: str | Path | None = None,
        engine: EngineConfig | None = None,
        threads: int | None = None,
        spare_cores: int = 0,
        tensor_parallel: int = 1,
        quantization: Asked = None,
        progress: bool = False,
    ) -> None:
        one_of("load_format", load_format, ("auto", "dummy"))
        whole("threads", threads, low=1, optional=True)
        whole("spare_cores", spare_cores, low=0)
        whole("tensor_parallel", tensor_parallel, low=1)
        self.progress = progress
        before = read_cpu()
        place = resolve_device(device)
        # Whatever can be refused without the weights is, as reading these may take minutes.
        self.engine_config = engine or EngineConfig()
        found = find_model(model, dummy=load_format == "dummy")
        self.cache = _USUAL_CACHE[found.config.kind] if cache == AUTO else cache
        self.cache_config = dict(cache_config or {})
        self.policy(self.cache, self.cache_config, lambda: DepthLookup({}))
        self.cache_name = self.cache if isinstance(self.cache, str) else name_of(self.cache)
        Shard(0, tensor_parallel).check(found.config)
        if self.engine_config.batch_invariant:
            check_ranks(tensor_parallel)
        self._structures: Structures | None = None
        self._structures_lock = threading.Lock()
        loading = Loading(
            dtype=dtype,
            device=place,
            quantization=quantization,
            threads=threads,
            spare_cores=spare_cores,
            tensor_parallel=tensor_parallel,
            check_weights=check_weights,
            utilization=self.engine_config.gpu_memory_utilization,
            progress=progress,
        )
        opened = loading.open(found, before)
        self.loaded = opened.loaded
        self.model = Transformer(self.loaded.config, self.loaded.weights, ranks=opened.ranks)
        try:
            # A file that cannot be used fails now, not when a policy first needs it.
            self._table = None if depth_table is None else DepthTable.load(depth_table, self.loaded)
            self.engine = self.new_engine()
        except BaseException:
            self.close()
            raise
        log.info(
            "remask: model=%s family=%s parameters=%.3g %s device=%s threads=%d (%s) tensor_parallel=%d "
            "attention=%s (%s) overlap=%s graphs=%s (%s) cache=%s%s %s max_model_len=%d "
            "pool=%.2f GB (%d tokens of K/V in %s)",
            model,
            self.loaded.config.family,
            self.loaded.config.parameters,
            opened.numbers,
            place,
            opened.threads.number,
            opened.threads.why,
            tensor_parallel,
            self.engine.choice.executor.name,
            self.engine.choice.executor.why,
            *("on" if on else "off" for on in (self.engine.choice.overlap, self.engine.choice.graphs)),
            self.engine.choice.why,
            self.cache_name,
            self.cache_config or ("" if isinstance(self.cache, str) else settings_of(self.cache) or ""),
            self.engine_config,
            self.engine.max_model_len,
            self.engine.pool.nbytes / 1e9,
            self.engine.pool.pages * self.engine.pool.page_size,
            str(self.model.kv_dtype).removeprefix("torch."),
        )

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
        return self.loaded.tokenizer

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Sampling parameters of requests that leave them out, as the checkpoint gives them."""
        return self.loaded.sampling

    def params(
        self,
        own: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        *,
        prompt_tokens: int = 0,
        template: Template | None = None,
    ) -> SamplingParams:
        """The sampling parameters of a request: its `own`, then `defaults`, then the checkpoint's.

        What a request sets is taken as it is. What it leaves open gives way to it, and to a prompt of `prompt_tokens`:
        a default length to the room beside the prompt, a default block length and number of steps to the length. What
        nobody sets is the family's choice. With a `template`, whose length `max_tokens` is, default blocks need not
        divide it. Every front uses this: `generate`, the commands, the server. Raises `ConfigError` on values that are
        not allowed.
        """
        usual = self.sampling if defaults is None else overlaid(self.sampling, defaults)
        growing = self.loaded.config.sampling.growing_canvas
        return fit(usual, own or {}, self.engine.max_model_len - prompt_tokens, template, growing=growing)

    def constraint(self, form: StructuredOutputs | Mapping[str, Any] | None) -> Constraint | None:
        """What makes responses have a form, such as `{"choice": ["yes", "no"]}`, compiled once. Safe on any thread.

        Raises `ConfigError` where the form cannot be compiled, or the model's tokens cannot spell it.
        """
        if form is None:
            return None
        parsed = form if isinstance(form, StructuredOutputs) else StructuredOutputs.from_mapping(form)
        if self.model.ranks.several:
            raise ConfigError("structured_outputs read the whole vocabulary in one process; leave tensor_parallel out")
        with self._structures_lock:
            if self._structures is None:
                self._structures = Structures.of_model(self.tokenizer, self.loaded.config)
        return self._structures.compiled(parsed)

    def compiles(self, form: StructuredOutputs | None) -> bool:
        """Whether `constraint` would compile a form, which may take seconds, as none like it is kept."""
        return form is not None and (self._structures is None or not self._structures.keeps(form))

    @property
    def depth_table(self) -> DepthTable:
        """The depth table of this model: of the given file, shipped, kept by an earlier start, or profiled now.

        Raises `ConfigError` where a model of several processes would have to be profiled.
        """
        if self._table is None and self.model.ranks.several and not self.has_depth_table:
            raise ConfigError(
                "a depth table is measured with one process: run 'remask profile' without tensor_parallel, and give "
                "its file as depth_table (--depth-table)"
            )
        if self._table is None:
            self._table = find_table(self)
        return self._table

    @property
    def has_depth_table(self) -> bool:
        """Whether `depth_table` can be read without profiling the model."""
        return self._table is not None or has_table(self.loaded)

    def new_engine(self, config: EngineConfig | None = None) -> Engine:
        """Another engine on the same weights, with its own memory and prefix store."""
        decode = self.tokenizer.decode if self.tokenizer is not None else None
        place = self.model.device
        defaults = read_defaults(place) if place.type == "cuda" else None  # on a CPU nothing runs beside the host
        return Engine(self.model, config or self.engine_config, self.loaded.fingerprint, decode, defaults)

    def policy(
        self,
        spec: str | CachePolicy,
        settings: Mapping[str, Any] | None = None,
        table: Callable[[], DepthLookup] | None = None,
    ) -> CachePolicy:
        """The cache policy that `spec` names, or the object itself.

        A depth table is looked up, or the model profiled, only where one is needed. Raises `ConfigError` on names and
        settings that cannot be used, and on settings beside an object.
        """
        return parse(spec, settings, table or (lambda: self.depth_table.lookup))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Sampling | Sequence[Sampling] | None = None,
        *,
        prefix_length: int | None = None,
        segments: Segments | Sequence[Segments] | None = None,
        cache: str | CachePolicy | None = None,
        cache_config: Mapping[str, Any] | None = None,
        trace: bool = False,
        top_logprobs: int | None = None,
        structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None,
        readers: Sequence[Reader] = (),
        control_tokens: bool | None = None,
    ) -> list[Output]:
        """Answer prompts, batched together, in their order.

        A prompt is text, token ids, chat messages, or as in vLLM an object: `{"prompt": ...}` or `{"prompt_token_ids":
        [...]}`. `prefix_length` leading tokens are shared with other requests;
        by default everything before the last user turn with messages, and nothing with text or token ids. `segments`
        are shared in its place: parts that may stand anywhere in the prompt, each an object of `start` and `length`;
        one list for all prompts, or one per prompt. `params` as
        `SamplingParams` are complete; a mapping such as `{"temperature": 0.5}`, or None, leaves the rest to the
        checkpoint's own defaults, as `params` of this object resolves them. `cache` and
        `cache_config` are as in `LLM`; without `cache` the default policy runs. With `top_logprobs` outputs have the
        log-probability of each token, and of so many of the most probable ones in the same step. `structured_outputs`
        is the form of all answers, as in `docs/sampling.md`. What `readers` of one's own find in each step is in
        `Output.reads`, by their names. Names of special tokens become these tokens in prompts
        that are text, and not in chat messages; `control_tokens` says that they do in both, or in neither. Raises
        `ConfigError`, before anything runs, where a prompt or a setting cannot be used.
        """
        requests = self.requests(
            prompts,
            params,
            prefix_length=prefix_length,
            segments=segments,
            policy=self._chosen_policy(cache, cache_config),
            control_tokens=control_tokens,
        )
        return self._answered(requests, trace, top_logprobs, structured_outputs, readers)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Sampling | Sequence[Sampling] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache: str | CachePolicy | None = None,
        cache_config: Mapping[str, Any] | None = None,
        trace: bool = False,
        top_logprobs: int | None = None,
        structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None,
        readers: Sequence[Reader] = (),
        control_tokens: bool | None = None,
    ) -> list[Output]:
        """Answer a conversation, or several of them batched together, in their order.

        As `generate` with conversations: a list of messages, or a list of such lists. `chat_template_kwargs` are
        variables of the chat template, such as `tools`. Raises `ConfigError`, before anything runs, where a
        conversation or a setting cannot be used.
        """
        requests = self.requests(
            conversations(messages),
            params,
            policy=self._chosen_policy(cache, cache_config),
            control_tokens=control_tokens,
            variables=chat_template_kwargs,
        )
        return self._answered(requests, trace, top_logprobs, structured_outputs, readers)

    def stream(
        self,
        prompt: Prompt,
        params: Sampling | None = None,
        *,
        cache: str | CachePolicy | None = None,
        cache_config: Mapping[str, Any] | None = None,
        structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None,
        control_tokens: bool | None = None,
    ) -> Generator[StreamedOutput, None, None]:
        """Answer one prompt, and yield its text as it settles, left to right.

        The arguments are those of `generate`. The last item alone has an `output`. A consumer that stops early cancels
        the request. Many prompts at a time are `AsyncLLM`'s. Raises `ConfigError`, with the first item, where something
        cannot be used.
        """
        check_idle(self.engine)
        request = self.streamed(prompt, params, cache, cache_config, structured_outputs, control_tokens)
        answer = self.answer(self.engine.check(request))
        with closing(events_of([request], self.engine)) as steps:
            for events in steps:
                yield from self.pieces(answer, events)

    def streamed(
        self,
        prompt: Prompt,
        params: Sampling | None = None,
        cache: str | CachePolicy | None = None,
        cache_config: Mapping[str, Any] | None = None,
        structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None,
        control_tokens: bool | None = None,
    ) -> Request:
        """The request of `stream`. Safe on any thread. Raises `ConfigError`."""
        policy = self._chosen_policy(cache, cache_config)
        (request,) = self.requests([prompt], params, policy=policy, control_tokens=control_tokens)
        return request.with_readers(self.constraint(structured_outputs))

    def answer(self, pending: PendingRequest) -> Answer:
        """What reads the text of a request as it settles. Raises `ConfigError` where no tokenizer is there."""
        if self.tokenizer is None:
            raise ConfigError("a stream is text, and this model folder has no tokenizer; use generate")
        kind, stops = self.loaded.config.kind, self.loaded.config.stop_ids
        blocks = pending.decoding.block_ranges
        return Answer(0, pending.request, self.tokenizer, stops, blocks=blocks, rewrites=kind == "uniform")

    def pieces(self, answer: Answer, events: Sequence[Event]) -> list[StreamedOutput]:
        """What one step of the engine adds to an answer: one item, or none."""
        delta = answer.take(events)
        output = None if delta.result is None else Output.of(answer.request, delta.result, self.tokenizer, trace=False)
        found = delta.text or delta.tokens or output
        return [StreamedOutput(delta.text, tuple(delta.tokens), output)] if found else []

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
        policy, requests = self._chosen_policy(cache, cache_config), []
        for index, (prompt, parts, own) in enumerate(zip(items, canvases, each, strict=True)):
            tokens, shared = encode(prompt, self.tokenizer, control_tokens)
            length = shared if prefix_length is None else prefix_length
            terms = Terms(canvas=parts, control_tokens=control_tokens)  # type: ignore[arg-type]
            chosen, template = self.response(terms, own or {}, len(tokens))
            requests.append(Request(str(index), tokens, chosen, length, policy, template=template))
        return self._answered(requests, trace, top_logprobs, structured_outputs)

    def response(
        self,
        terms: Terms,
        own: Mapping[str, Any],
        prompt_tokens: int,
        *,
        defaults: Mapping[str, Any] | None = None,
        command: Mapping[str, Any] | None = None,
        around: tuple[str, str] | None = None,
    ) -> tuple[SamplingParams, Template | None]:
        """The sampling parameters of a request, as `params` resolves them, and its template, if it has one.

        `terms` hold its canvas, its suffix or its replay. What it leaves out and the `command` sets is taken as it is,
        too; but the parts of a canvas say its length. `around` are texts before and behind the response that are part
        of it and not shown. Raises `ConfigError` where these and the parameters contradict each other.
        """

        def resolve(own: Mapping[str, Any], given: int, template: Template | None) -> SamplingParams:
            return self.params({**(command or {}), **own}, defaults, prompt_tokens=given, template=template)

        stops, longest = self.loaded.config.stop_ids, self.engine.max_model_len
        return response_of(terms, own, prompt_tokens, self.tokenizer, stops, resolve, longest, around)

    def _chosen_policy(self, cache: str | CachePolicy | None, settings: Mapping[str, Any] | None) -> CachePolicy:
        if cache is None:
            return self.policy(self.cache, settings or self.cache_config)
        return self.policy(cache, settings)

    def _answered(
        self,
        requests: Sequence[Request],
        trace: bool,
        top_logprobs: int | None,
        form: StructuredOutputs | Mapping[str, Any] | None,
        readers: Sequence[Reader] = (),
    ) -> list[Output]:
        """Run `requests` under these terms. Returns their outputs in their order."""
        constraint = self.constraint(form)
        logprobs = None if top_logprobs is None else Logprobs(top_logprobs)
        asked = [each.with_readers(logprobs, constraint, *readers) for each in requests]
        outputs = {output.id: output for output in self.run(asked, trace=trace)}
        return [outputs[request.id] for request in requests]

    def decide(
        self,
        state: str | Mapping[str, Any] | Sequence[Any],
        questions: Mapping[str, Any],
        *,
        together: bool = False,
        calibrate: bool = False,
        end_turn: bool = True,
        cache: str | CachePolicy | None = None,
        cache_config: Mapping[str, Any] | None = None,
    ) -> Decided:
        """Answer questions over one state by the model's distribution over a few labels each; nothing is generated.

        The fields are those of `docs/decisions.md`. Each question is a canvas of its own, all of
        them in one batch over the state as their shared prefix, and takes one pass; with labels of several tokens, one
        for each beginning of a label, in the same batch. `cache` and `cache_config` are as in `generate`. Raises
        `ConfigError`, before anything runs, where a question cannot be asked.
        """
        fields = {"together": together, "calibrate": calibrate, "end_turn": end_turn}
        plan = self.decisions(Decisions(state=state, questions=questions, **fields))
        if cache is None:
            policy = self.policy(self.cache, cache_config or self.cache_config)
        else:
            policy = self.policy(cache, cache_config)
        requests = [plan.request(number, str(number), policy=policy) for number in range(len(plan.asks))]
        outputs = {output.id: output for output in self.run(requests)}
        ordered = [outputs[str(number)] for number in range(len(plan.asks))]
        failed = next((output.error for output in ordered if output.error is not None), None)
        if failed is not None:
            raise DecisionError(f"a question could not be read: {failed}")
        return Decided(
            plan.answers([output.reads[Reading.name] for output in ordered]), total_usage([o.usage for o in ordered])
        )

    def decisions(self, asked: Decisions, most: int | None = None) -> DecisionPlan:
        """The passes that answer decisions, and what follows from them. Safe on any thread.

        Raises `ConfigError` where a question cannot be asked, and where they take more than `most` canvases.
        """
        config = self.loaded.config
        Reading.check_kind(config.kind, config.family)
        if self.tokenizer is None:
            raise ConfigError("decisions need a tokenizer, and this model folder has none")
        return DecisionPlan.of(asked, self.tokenizer, config.mask_id, most)

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Sampling | Sequence[Sampling] | None = None,
        *,
        prefix_length: int | None = None,
        segments: Segments | Sequence[Segments] | None = None,
        policy: CachePolicy | None = None,
        control_tokens: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[Request]:
        """Requests for `run`, as `generate` makes them; their ids are their numbers, from "0".

        `variables` are those of the chat template.
        """
        items = as_prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(items)
        if len(each) != len(items):
            raise ConfigError(f"params: one for all prompts or one per prompt ({len(items)}), got {len(each)}")
        chosen = policy or self.policy(self.cache, self.cache_config)
        parts = None if segments is None else _each_parts(segments, len(items))
        requests = []
        for index, (prompt, own) in enumerate(zip(items, each, strict=True)):
            tokens, shared = encode(prompt, self.tokenizer, control_tokens, variables)
            if not isinstance(own, SamplingParams):
                own = self.params(own, prompt_tokens=len(tokens))
            if parts is None:
                length = shared if prefix_length is None else prefix_length
                request = Request(str(index), tokens, own, length, chosen, find_prefix=prefix_length is None)
            else:  # what a conversation shares by default gives way to them
                request = Request(str(index), tokens, own, prefix_length or 0, chosen, segments=parts[index])
            requests.append(request)
        return requests

    def run(
        self,
        requests: Sequence[Request],
        *,
        trace: bool = False,
        engine: Engine | None = None,
        progress: bool | None = None,
    ) -> Generator[Output, None, None]:
        """Run requests, each under its own policy, and yield their outputs as they finish.

        Raises `ConfigError`, before any of them has run, on a request that cannot run. A consumer that stops early
        cancels the other requests.
        """
        shown = self.progress if progress is None else progress
        by_id = {request.id: request for request in requests}
        steps = closing(events_of(requests, engine or self.engine))
        with steps as each, tqdm(total=len(requests), desc="requests", unit="req", disable=not shown) as bar:
            for events in each:
                for event in events:
                    if event.result is not None:
                        bar.update()
                        yield Output.of(by_id[event.id], event.result, self.tokenizer, trace=trace)


def _each_parts(segments: Segments | Sequence[Segments], prompts: int) -> list[Sequence[Segment]]:
    """The parts of each of so many prompts, from one list for all of them or from one per prompt."""
    several = not all(isinstance(each, Segment | Mapping) for each in segments)
    given: Sequence[Any] = segments if several else [segments] * prompts
    if len(given) != prompts:
        raise ConfigError(f"segments: one list for all prompts or one per prompt ({prompts}), got {len(given)}")
    return [Terms(segments=each).parts for each in given]
