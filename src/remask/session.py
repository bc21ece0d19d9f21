"""What requests to one model are made of and run on: parameters, policies, forms and depth tables, in one place."""

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from inspect import signature
from typing import Any, Final, Literal, TypeAlias, Unpack

from remask.answers.answer import ResponseCollector
from remask.answers.decisions import DecisionPlan
from remask.answers.infill import response_of
from remask.answers.structured import Structures
from remask.checkpoint.loaded import LoadedModel
from remask.depth.find import find_table, keep_earned, load_earned
from remask.depth.table import DepthTable
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import PendingRequest, Request, request_of
from remask.errors import ConfigError, FormError, UnknownNameError
from remask.machine.progress import Progress
from remask.model.transformer import Transformer
from remask.outputs import Output, StreamedOutput
from remask.plan.canvas import Template
from remask.policies import CachePolicy, name_of, parse, settings_of
from remask.policies.bicache import DepthLookup, Earned
from remask.policies.registry import Depths, from_file
from remask.readers.base import Reader
from remask.readers.constraint import Constraint
from remask.readers.decision import Reading
from remask.request.forms import StructuredOutputs
from remask.request.questions import Decisions
from remask.request.result import Event
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Part, TermKeywords, Terms, check_sampling
from remask.sampling.defaults import fit_defaults, overlay_defaults, restrict_to_mode
from remask.text.prompts import Prompt, as_prompts, encode
from remask.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Sampling: TypeAlias = SamplingParams | Mapping[str, Any]
Canvas: TypeAlias = Sequence[Part | Mapping[str, Any]]
NO_DEPTHS: Final = "none"
"""In place of a depth table: tables that are shipped or kept are not used."""
NO_TABLE = (
    "no depth table of %r is at hand and audits earn none, so cache auto is %s, and shared prefixes are computed with "
    "each request. Leave audits on, or measure a table with 'remask profile --model %s --output FILE', from prompts "
    "like yours, and give it as --depth-table FILE"
)


class RequestKeywords(TermKeywords, total=False):
    """The terms of requests as keywords of methods of `LLM`."""

    cache: str | CachePolicy | None


class Session:
    """What every front shares, `LLM`, `AsyncLLM`, commands, servers and measurements: requests to one model.

    Args:
        loaded: the model's files.
        model: the same, to be computed.
        config: limits of the engine.
        cache: the default policy, as `LLM` takes it; `auto` is resolved.
        settings: its settings.
        auto: nobody asked for `cache`, so a policy that needs a depth table gives way where none is at hand.
        depth_table: the table that was given; without one it is looked for. NO_DEPTHS: none is looked for, and audits
            begin anew.
        progress: tell on stderr how far answers have come.

    Attributes:
        engine: the engine of `run`.
        cache: the default policy; what was chosen is a name.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        model: Transformer,
        config: EngineConfig,
        cache: str | CachePolicy,
        settings: dict[str, Any],
        *,
        auto: bool,
        depth_table: DepthTable | Literal["none"] | None,
        progress: bool,
    ) -> None:
        self.loaded, self.model, self.engine_config, self.progress = loaded, model, config, progress
        self.cache, self.cache_config = cache, settings
        self._best = cache if auto else None
        self._given = depth_table if isinstance(depth_table, DepthTable) else None
        self._looks = depth_table != NO_DEPTHS
        self._tables: dict[str | None, DepthTable | None] = {}  # by adapter
        self._auto: dict[str | None, str] = {}  # what the best cache comes to, by adapter
        self._structures: Structures | None = None
        self._structures_lock = threading.Lock()
        self.cache, policy_settings = self.default_cache()
        if config.audit and self.policy(self.cache, policy_settings).traits.exact:
            raise ConfigError(
                f"audit={config.audit:g}: the cache {self.cache_name!r} computes what an audit would compare it with; "
                "leave audit out (requests that name a cache which approximates are audited all the same), or choose "
                "such a cache, as bicache"
            )
        self.engine = self.new_engine()
        if self._looks and self.earns:
            depths, fingerprint = self.engine.auditor.depths, loaded.fingerprint
            load_earned(depths, fingerprint)
            depths.changed = lambda: keep_earned(depths, fingerprint)

    @property
    def cache_name(self) -> str:
        """The default policy's name, for people to read."""
        return self.cache if isinstance(self.cache, str) else name_of(self.cache)

    @property
    def described(self) -> str:
        """How it computes, and with how much memory: the second half of the start-up line."""
        engine, choice = self.engine, self.engine.choice
        overlap, graphs = ("on" if on else "off" for on in (choice.overlap, choice.graphs))
        settings = self.cache_config or ("" if isinstance(self.cache, str) else settings_of(self.cache) or "")
        return (
            f"attention={choice.executor.name} ({choice.executor.why}) overlap={overlap} graphs={graphs} "
            f"({choice.why}) "
            f"cache={self.cache_name}{settings} max_num_seqs={self.engine_config.max_num_seqs} "
            f"max_model_len={engine.max_model_len} pool={engine.pool.nbytes / 1e9:.2f} GB "
            f"({engine.pool.pages * engine.pool.page_size} tokens of K/V in "
            f"{str(self.model.kv_dtype).removeprefix('torch.')})"
        )

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
        check_sampling(own or {})
        usual = self.sampling if defaults is None else self.overlaid(defaults)
        shape, room = self.loaded.config, self.engine.max_model_len - prompt_tokens
        return fit_defaults(usual, own or {}, room, template, **self._blocks, modes=shape.causal_prefix)

    def overlaid(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """`defaults` and, for the rest, the checkpoint's as far as they fit them. Raises `ConfigError`."""
        return overlay_defaults(self.sampling, defaults, **self._blocks)

    @property
    def _blocks(self) -> dict[str, bool]:
        """How the model's responses are cut into blocks, as `fit` takes it."""
        shape = self.loaded.config
        masked = shape.kind == "masked"
        ragged = masked and shape.sampling.schedule == "linear"
        return {"growing": shape.sampling.growing_canvas, "whole": masked, "ragged": ragged}

    def constraint(self, form: StructuredOutputs | Mapping[str, Any] | None, beginning: str = "") -> Constraint | None:
        """Return the reader that gives responses a form, such as `{"choice": ["yes", "no"]}`; None without a form.

        Forms are compiled once. Responses continue the text `beginning`. Safe on any thread. Raises `ConfigError` if
        the form cannot be compiled, the model's tokens cannot spell it, or nothing of the form begins with that text.
        """
        if form is None:
            return None
        parsed = form if isinstance(form, StructuredOutputs) else StructuredOutputs.from_mapping(form)
        return self._forms().compile(parsed, beginning)

    @property
    def takes_forms(self) -> bool:
        """Whether the model's answers can have a form at all."""
        try:
            self._forms()
        except ConfigError:
            return False
        return self.loaded.config.kind != "uniform"

    def _forms(self) -> Structures:
        if self.model.ranks.several:
            raise FormError(" read the whole vocabulary in one process; leave tensor_parallel out")
        with self._structures_lock:
            if self._structures is None:
                self._structures = Structures.of_model(self.tokenizer, self.loaded.config)
        return self._structures

    def needs_compilation(self, form: StructuredOutputs | None) -> bool:
        """Whether `constraint` would compile `form`, which may take seconds, because it is not cached."""
        return form is not None and (self._structures is None or not self._structures.is_cached(form))

    def depth_table_of(self, adapter: str | None) -> DepthTable | None:
        """The depth table of requests with this adapter, or with none: given, kept or shipped; None without one.

        Raises `UnknownNameError` on an unknown adapter.
        """
        if self._given is not None or not self._looks:
            return self._given
        if adapter not in self._tables:
            self._tables[adapter] = find_table(replace(self.loaded, fingerprint=self.fingerprint_of(adapter)))
        return self._tables[adapter]

    def fingerprint_of(self, adapter: str | None) -> str:
        """Return the identity of the model with this adapter, or none. Raises `UnknownNameError` on an unknown one."""
        loaded = self.loaded
        if adapter is None:
            return loaded.fingerprint
        if adapter not in loaded.adapters:
            raise UnknownNameError("adapter", adapter, loaded.adapters)
        return f"{loaded.fingerprint}-{loaded.adapters[adapter].fingerprint}"

    def new_engine(self, config: EngineConfig | None = None) -> Engine:
        """Return a new engine on the same weights, with its own K/V pages and prefix store."""
        decode = self.tokenizer.decode if self.tokenizer is not None else None
        return Engine(self.model, config or self.engine_config, self.loaded.fingerprint, decode)

    def policy(
        self,
        spec: str | CachePolicy,
        settings: Mapping[str, Any] | None = None,
        depths: Depths | None = None,
        *,
        adapter: str | None = None,
    ) -> CachePolicy:
        """The cache policy that `spec` names, or the object itself.

        What `depths` returns, by default those of the `adapter`, is asked for only where it is needed. Raises
        `ConfigError` on names and settings that cannot be used, and on settings beside an object.
        """
        return parse(spec, settings, depths or (lambda: self.depths(adapter)))

    @property
    def earns(self) -> bool:
        """Whether audits earn depths."""
        return self.engine_config.earns and self.loaded.config.kind == "masked"

    def depths(self, adapter: str | None) -> DepthLookup | Earned:
        """The depth of requests with this adapter, or with none, that give none: a given table, or what audits earn.

        A table that is shipped or was kept is where they begin. Raises `ConfigError` where audits earn nothing and
        there is no table.
        """
        if self._given is not None:
            return self._given.lookup
        table = self.depth_table_of(adapter)
        known = None if table is None else table.lookup
        if self.earns:
            return Earned(known)
        if known is None:
            raise ConfigError(
                f"there is no depth table of {self.loaded.name!r}, and audits earn none here: give a number of layers, "
                'as cache_config {"depth": 2}, name a table with --depth-table, or leave audits on'
            )
        return known

    def terms(self, keywords: RequestKeywords, method: Callable[..., Any]) -> tuple[Terms, CachePolicy]:
        """The terms that are keywords of `method`, and the cache policy that they name.

        Raises `UnknownNameError` on other keywords, and `ConfigError` on values that cannot be used.
        """
        values: dict[str, Any] = dict(keywords)
        known = {*RequestKeywords.__optional_keys__, *signature(method).parameters} - {"self", "terms"}
        for name in values:
            if name not in known:
                raise UnknownNameError("argument", name, known)
        cache = values.pop("cache", None)
        if isinstance(form := values.get("structured_outputs"), Mapping):
            values["structured_outputs"] = StructuredOutputs.from_mapping(form)
        terms = Terms.from_mapping(values)
        return terms, self.chosen_policy(cache, terms.cache_config, terms.adapter)

    def streamed(self, prompt: Prompt, params: Sampling | None = None, **terms: Unpack[RequestKeywords]) -> Request:
        """Return the request of `LLM.stream`. Safe on any thread. Raises `ConfigError` on a bad prompt or setting."""
        (request,) = self.requests([prompt], params, *self.terms(terms, self.streamed))
        return request

    def answer(self, pending: PendingRequest) -> ResponseCollector:
        """Return the collector of a request's text as it settles. Raises `ConfigError` without a tokenizer."""
        if self.tokenizer is None:
            raise ConfigError("a stream is text, and this model folder has no tokenizer; use generate")
        shape, blocks = self.loaded.config, pending.decoding.block_ranges
        return ResponseCollector(
            0, pending.request, self.tokenizer, shape.stop_ids, blocks=blocks, rewrites=shape.rewrites
        )

    def pieces(self, answer: ResponseCollector, events: Sequence[Event]) -> list[StreamedOutput]:
        """Return what the `events` of one step add to an answer: one item, or none if they add nothing."""
        delta = answer.apply(events)
        output = None if delta.result is None else Output.of(answer.request, delta.result, self.tokenizer, trace=False)
        if not (delta.text or delta.tokens or output):
            return []
        return [StreamedOutput(delta.text, tuple(delta.tokens), output)]

    def response(
        self,
        terms: Terms,
        own: Sampling,
        prompt_tokens: int,
        *,
        defaults: Mapping[str, Any] | None = None,
        command: Mapping[str, Any] | None = None,
        around: tuple[str, str] | None = None,
    ) -> tuple[SamplingParams, Template | None]:
        """The sampling parameters of a request, as `params` resolves them, and its template, if it has one.

        `own` ones that are `SamplingParams` are complete. `terms` hold its canvas or its suffix. What it leaves out
        and the `command` sets is taken as it is, too; but the parts of a canvas say its length. `around` are texts
        before and behind the response that are part of it and not shown. Raises `ConfigError` where these and the
        parameters contradict each other.
        """
        if isinstance(own, SamplingParams):
            if terms.canvas is not None or terms.suffix is not None:
                raise ConfigError(
                    "params: a response with fixed parts takes a mapping, such as {'temperature': 0.5}, which leaves "
                    "the rest to it; SamplingParams are complete"
                )
            return own, None
        if self.loaded.config.causal_prefix:
            command = restrict_to_mode(command or {}, own.get("mode"))

        def resolve(own: Mapping[str, Any], given: int, template: Template | None) -> SamplingParams:
            return self.params({**(command or {}), **own}, defaults, prompt_tokens=given, template=template)

        stops, longest = self.loaded.config.stop_ids, self.engine.max_model_len
        return response_of(terms, own, prompt_tokens, self.tokenizer, stops, resolve, longest, around)

    def default_cache(
        self, adapter: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> tuple[str | CachePolicy, Mapping[str, Any]]:
        """Return the cache and its settings of requests that name no cache; `settings` replace the session's.

        Raises `UnknownNameError` on an unknown adapter.
        """
        given, best = self.cache_config if settings is None else settings, self._best
        if not isinstance(best, str):
            return self.cache, given
        outer, _, inner = best.partition("+")
        if given or outer != "bicache":
            return best, given
        if adapter not in self._auto:
            reads = self.earns or self.depth_table_of(adapter) is not None
            self._auto[adapter] = best if reads else inner or "none"
            if self._auto[adapter] != best:
                name = self.loaded.name if adapter is None else f"{self.loaded.name} with {adapter}"
                log.info(NO_TABLE, name, self._auto[adapter], self.loaded.name)
        return self._auto[adapter], given

    def chosen_policy(
        self, cache: str | CachePolicy | None, settings: Mapping[str, Any] | None, adapter: str | None
    ) -> CachePolicy:
        """Return the policy of Python arguments, which may name a file or no cache. Raises `ConfigError`."""
        if cache is None:
            return self.policy(*self.default_cache(adapter, settings or None), adapter=adapter)
        return self.policy(*from_file(cache, settings), adapter=adapter)

    def policy_of(self, terms: Terms) -> CachePolicy:
        """Return the policy of a request in JSON, which may not name a file. Raises `ConfigError`."""
        if terms.cache is None:
            return self.policy(*self.default_cache(terms.adapter, terms.cache_config), adapter=terms.adapter)
        return self.policy(terms.cache, terms.cache_config, adapter=terms.adapter)

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
        params: Sampling | Sequence[Sampling | None] | None = None,
        terms: Terms | None = None,
        policy: CachePolicy | None = None,
        *,
        canvases: Sequence[Canvas] | None = None,
        readers: Sequence[Reader] = (),
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[Request]:
        """Requests for `run`, as `generate` and `infill` make them; their ids are their numbers, from "0".

        The `terms` are those of all of them, in which `canvases`, one for each, stand. `variables` are those of the
        chat template, and conversations end as in `chat`. Raises `ConfigError`.
        """
        items, terms = as_prompts(prompts), terms or Terms()
        sampling = list(params) if isinstance(params, Sequence) else [params] * len(items)
        for name, values in (("canvas", canvases), ("params", sampling)):
            if values is not None and len(values) != len(items):
                raise ConfigError(f"{name}: one for all prompts or one per prompt ({len(items)}), got {len(values)}")
        policy = policy or self.policy(*self.default_cache(terms.adapter), adapter=terms.adapter)
        requests = []
        for index, (prompt, own) in enumerate(zip(items, sampling, strict=True)):
            tokens, shared = encode(
                prompt,
                self.tokenizer,
                terms.control_tokens,
                variables,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            if canvases is not None:
                parts: Any = canvases[index]
                terms = replace(terms, canvas=parts)
            begun: str = prompt[-1]["content"] if continue_final_message else ""  # type: ignore[index]
            request = self.request(str(index), tokens, shared, own or {}, terms, policy, beginning=begun)
            requests.append(request.with_readers(*readers))
        return requests

    def request(
        self,
        name: str,
        tokens: Sequence[int],
        shared: int,
        own: Sampling,
        terms: Terms,
        policy: CachePolicy,
        *,
        command: Mapping[str, Any] | None = None,
        beginning: str = "",
    ) -> Request:
        """The request of a prompt of `tokens`, `shared` of which are its prefix by default, as `response` resolves it.

        The answer goes on from a text that is `beginning`. Raises `ConfigError`.
        """
        params, template = self.response(terms, own, len(tokens), command=command)
        constraint = self.constraint(terms.structured_outputs, beginning)
        return request_of(
            name,
            tokens,
            params,
            policy,
            terms,
            self.loaded.config,
            shared=shared,
            constraint=constraint,
            template=template,
            continues=bool(beginning),
        )

    def run(
        self,
        requests: Sequence[Request],
        *,
        trace: bool = False,
        engine: Engine | None = None,
        progress: bool | None = None,
    ) -> Generator[Output, None, None]:
        """Run requests, each under its own policy, and yield their outputs as they finish.

        A consumer that stops early cancels the requests that have not finished.

        Args:
            trace: add the transfers of each step to the outputs.
            engine: runs the requests; None: the session's own.
            progress: show a progress bar on stderr; None: as the session was told.

        Raises `ConfigError`, before any request runs, if one of them cannot run or the engine is not idle.
        """
        show_progress = self.progress if progress is None else progress
        by_id = {request.id: request for request in requests}
        stepper = closing(events_of(requests, engine or self.engine))
        step_count = 0
        token_count = 0
        with stepper as steps, Progress("answering", len(requests), "requests", enabled=show_progress) as bar:
            for events in steps:
                step_count += 1
                token_count += sum(len(event.transfer.positions) for event in events if event.transfer is not None)
                bar.update(0, f"step {step_count}, {token_count} tokens")
                for event in events:
                    if event.result is not None:
                        bar.update()
                        yield Output.of(by_id[event.id], event.result, self.tokenizer, trace=trace)


def check_idle(engine: Engine) -> None:
    """Raise `ConfigError` if `engine` has requests already."""
    if engine.busy:
        raise ConfigError("the engine is running other requests; exhaust or close that run, or use new_engine()")


def events_of(requests: Sequence[Request], engine: Engine) -> Generator[list[Event], None, None]:
    """Run requests, and yield the events of each step. A consumer that stops early cancels them.

    Raises `ConfigError`, before any request runs, if one of them cannot run or the engine is not idle.
    """
    check_idle(engine)
    try:
        for request in requests:
            engine.add(request)
        while engine.busy:
            yield _step(engine)
    finally:
        for request in requests:
            engine.cancel(request.id)
        while engine.busy:
            _step(engine)


def _step(engine: Engine) -> list[Event]:
    """Run one step of `engine` and return its events; none after a failed step, from which the engine recovers."""
    try:
        return engine.step()
    except Exception as error:
        engine.recover(error)
        return []
