"""`Session`: makes requests to one model, of parameters, policies, forms and depth tables, and runs them."""

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
from remask.checks.fields import declared
from remask.checks.values import shown
from remask.depth.find import find_table, load_earned, save_earned
from remask.depth.table import DepthTable
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import PendingRequest, Request, request_of
from remask.errors import ConfigError, FormError, UnknownNameError
from remask.machine.device import dtype_name
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
"""In place of a depth table: neither a shipped nor a saved one is used."""
NO_TABLE = (
    "%r has no depth table and audits earn none, so cache auto is %s, and shared prefixes are computed with "
    "each request. Leave audits on, or measure a table with 'remask profile --model %s --output FILE', from prompts "
    "like yours, and give it as --depth-table FILE"
)


class RequestKeywords(TermKeywords, total=False):
    """The terms of requests as keywords of methods of `LLM`."""

    cache: str | CachePolicy | None


class Session:
    """Makes and runs requests to one model, for `LLM`, `AsyncLLM`, commands, servers and measurements.

    Args:
        loaded: the model's files.
        model: the same model, to be computed.
        config: limits of the engine.
        cache: the default policy, as `LLM` takes it, but not "auto".
        settings: settings of that policy.
        auto: the user chose no cache, so without a depth table `bicache` is replaced by its inner policy.
        depth_table: a table of the user. None: a saved or shipped one is used, if any; NO_DEPTHS: none is used, and
            audits begin without depths.
        progress: whether `run` shows a progress bar on stderr.

    Raises `ConfigError` if audits are set for a cache that is exact.

    Attributes:
        engine: the engine of `run`.
        cache: the default policy of the model without an adapter.
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
        self.loaded = loaded
        self.model = model
        self.engine_config = config
        self.progress = progress
        self.cache = cache
        self.cache_config = settings
        self._auto_cache = cache if auto else None
        self._auto_cache_by_adapter: dict[str | None, str] = {}
        self._user_table = depth_table if isinstance(depth_table, DepthTable) else None
        self._looks_up_depths = depth_table != NO_DEPTHS
        self._depth_tables: dict[str | None, DepthTable | None] = {}  # by adapter
        self._structures: Structures | None = None  # the compiler of forms, once one is needed
        self._structures_lock = threading.Lock()
        self.cache, policy_settings = self.default_cache()
        if config.audit and self.policy(self.cache, policy_settings).traits.exact:
            raise ConfigError(
                f"audit={config.audit:g}: the cache {self.cache_name!r} computes what an audit would compare it with; "
                "leave audit out (requests that name a cache which approximates are audited all the same), or choose "
                "such a cache, as bicache"
            )
        self.engine = self.new_engine()
        if self._looks_up_depths and self.earns_depths:
            depths = self.engine.auditor.depths
            load_earned(depths, loaded.fingerprint)
            depths.changed = lambda: save_earned(depths, loaded.fingerprint)

    @property
    def cache_name(self) -> str:
        """The default policy's name, for people to read."""
        return self.cache if isinstance(self.cache, str) else name_of(self.cache)

    @property
    def description(self) -> str:
        """How the engine computes, and with how much memory: the second half of the start-up line."""
        engine = self.engine
        choice = engine.choice
        overlap, graphs = ("on" if enabled else "off" for enabled in (choice.overlap, choice.graphs))
        settings = self.cache_config or ("" if isinstance(self.cache, str) else settings_of(self.cache) or "")
        return (
            f"attention={choice.executor.name} ({choice.executor.why}) overlap={overlap} graphs={graphs} "
            f"({choice.why}) "
            f"cache={self.cache_name}{settings} max_num_seqs={self.engine_config.max_num_seqs} "
            f"max_model_len={engine.max_model_len} pool={engine.pool.nbytes / 1e9:.2f} GB "
            f"({engine.pool.page_count * engine.pool.page_size} tokens of K/V in "
            f"{dtype_name(self.model.kv_dtype)})"
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model folder's tokenizer, if it has one."""
        return self.loaded.tokenizer

    @property
    def sampling(self) -> Mapping[str, Any]:
        """The checkpoint's defaults of sampling parameters."""
        return self.loaded.sampling

    def params(
        self,
        requested: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        *,
        prompt_tokens: int = 0,
        template: Template | None = None,
    ) -> SamplingParams:
        """Return the sampling parameters of a request: the `requested` ones, then `defaults`, then the checkpoint's.

        Requested values are never changed. `fit_defaults` adapts defaults to them: a default length to the room beside
        a prompt of `prompt_tokens`, a default block length and number of steps to the length. `template` is that of the
        response. Raises `ConfigError` on values that are not allowed.
        """
        check_sampling(requested or {})
        base = self.sampling if defaults is None else self.merged_defaults(defaults)
        room = self.engine.max_model_len - prompt_tokens
        modes = self.loaded.config.causal_prefix
        return fit_defaults(base, requested or {}, room, template, **self._block_rules, modes=modes)

    def merged_defaults(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """`defaults`, and the checkpoint's for all other parameters, as far as they fit. Raises `ConfigError`."""
        return overlay_defaults(self.sampling, defaults, **self._block_rules)

    @property
    def _block_rules(self) -> dict[str, bool]:
        """The arguments of `fit_defaults` that say how responses of the model are cut into blocks."""
        config = self.loaded.config
        masked = config.kind == "masked"
        ragged = masked and config.sampling.schedule == "linear"
        return {"growing": config.sampling.growing_canvas, "whole": masked, "ragged": ragged}

    def constraint(self, form: StructuredOutputs | Mapping[str, Any] | None, beginning: str = "") -> Constraint | None:
        """Return the reader that gives responses a form, such as `{"choice": ["yes", "no"]}`; None without a form.

        Forms are compiled once. Responses continue the text `beginning`. Safe on any thread. Raises `ConfigError` if
        the form cannot be compiled, the model's tokens cannot spell it, or no text of the form begins with `beginning`.
        """
        if form is None:
            return None
        parsed = form if isinstance(form, StructuredOutputs) else StructuredOutputs.from_mapping(form)
        return self._load_structures().compile(parsed, beginning)

    @property
    def supports_forms(self) -> bool:
        """Whether answers of the model can have a form."""
        try:
            self._load_structures()
        except ConfigError:
            return False
        return self.loaded.config.kind != "uniform"

    def _load_structures(self) -> Structures:
        """The compiler of forms, made once. Raises `ConfigError` if the model's answers can have no form."""
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
        """The user's, saved or shipped depth table of the model with this adapter, or with none; None without a table.

        Raises `UnknownNameError` on an unknown adapter.
        """
        if self._user_table is not None or not self._looks_up_depths:
            return self._user_table
        if adapter not in self._depth_tables:
            self._depth_tables[adapter] = find_table(replace(self.loaded, fingerprint=self.fingerprint_of(adapter)))
        return self._depth_tables[adapter]

    def fingerprint_of(self, adapter: str | None) -> str:
        """The identity of the model with this adapter, or with none. Raises `UnknownNameError` on an unknown one."""
        loaded = self.loaded
        if adapter is None:
            return loaded.fingerprint
        if adapter not in loaded.adapters:
            raise UnknownNameError("adapter", adapter, loaded.adapters)
        return f"{loaded.fingerprint}-{loaded.adapters[adapter].fingerprint}"

    def new_engine(self, config: EngineConfig | None = None) -> Engine:
        """A new engine on the same weights, with its own K/V pages and prefix store."""
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

        `depths` is called only if the policy needs a depth; by default it returns the `depths` of the `adapter`. Raises
        `ConfigError` on names and settings that cannot be used, and on settings beside an object.
        """
        return parse(spec, settings, depths or (lambda: self.depths(adapter)))

    @property
    def earns_depths(self) -> bool:
        """Whether audits prove the depths of the model."""
        return self.engine_config.earns and self.loaded.config.kind == "masked"

    def depths(self, adapter: str | None) -> DepthLookup | Earned:
        """The default depths of requests with this adapter, or with none: those of the user's table, or earned ones.

        Earned depths begin with a saved or shipped table. Raises `ConfigError` if audits earn none and there is no
        table.
        """
        if self._user_table is not None:
            return self._user_table.lookup
        table = self.depth_table_of(adapter)
        lookup = None if table is None else table.lookup
        if self.earns_depths:
            return Earned(lookup)
        if lookup is None:
            raise ConfigError(
                f"there is no depth table of {self.loaded.name!r}, and audits earn none here: give a number of layers, "
                'as cache_config {"depth": 2}, name a table with --depth-table, or leave audits on'
            )
        return lookup

    def terms(self, keywords: RequestKeywords, method: Callable[..., Any]) -> tuple[Terms, CachePolicy]:
        """The terms of a call of `method` with these `keywords`, and the cache policy that they name.

        Raises `UnknownNameError` on keywords that are no terms, and `ConfigError` on sampling parameters, which belong
        in `params`, and on values that cannot be used.
        """
        values: dict[str, Any] = dict(keywords)
        arguments = {*RequestKeywords.__optional_keys__, *signature(method).parameters} - {"self", "keywords"}
        for name, value in values.items():
            if name not in arguments and name in declared(SamplingParams):
                raise ConfigError(
                    f"{name} is a sampling parameter: it belongs in params, as params={{{name!r}: {value!r}}}"
                )
            if name not in arguments:
                raise UnknownNameError("argument", name, arguments)
        cache = values.pop("cache", None)
        form = values.get("structured_outputs")
        if isinstance(form, Mapping):
            values["structured_outputs"] = StructuredOutputs.from_mapping(form)
        terms = Terms.from_mapping(values)
        return terms, self.policy_of_arguments(cache, terms.cache_config, terms.adapter)

    def stream_request(
        self, prompt: Prompt, params: Sampling | None = None, **keywords: Unpack[RequestKeywords]
    ) -> Request:
        """The request of `LLM.stream`. Safe on any thread. Raises `ConfigError` on a bad prompt or setting."""
        (request,) = self.requests([prompt], params, *self.terms(keywords, self.stream_request))
        return request

    def collector(self, pending: PendingRequest) -> ResponseCollector:
        """A collector of a request's text as it settles. Raises `ConfigError` without a tokenizer."""
        if self.tokenizer is None:
            raise ConfigError("a stream is text, and this model folder has no tokenizer; use generate")
        config = self.loaded.config
        blocks = pending.decoding.block_ranges
        stop_ids = config.stop_ids
        return ResponseCollector(0, pending.request, self.tokenizer, stop_ids, blocks=blocks, rewrites=config.rewrites)

    def collect(self, collector: ResponseCollector, events: Sequence[Event]) -> list[StreamedOutput]:
        """Apply the `events` of one step to `collector`. Returns what they add to the answer: one item, or none."""
        delta = collector.apply(events)
        result = delta.result
        output = None if result is None else Output.of(collector.request, result, self.tokenizer, trace=False)
        if not (delta.text or delta.tokens or output):
            return []
        return [StreamedOutput(delta.text, tuple(delta.tokens), output)]

    def response(
        self,
        terms: Terms,
        sampling: Sampling,
        prompt_tokens: int,
        *,
        defaults: Mapping[str, Any] | None = None,
        command_sampling: Mapping[str, Any] | None = None,
        affixes: tuple[str, str] | None = None,
    ) -> tuple[SamplingParams, Template | None]:
        """Return the sampling parameters and the template of a response, None if all of it is one hole.

        `SamplingParams` are used as they are. For a mapping, `params` resolves the parameters that it lacks, from
        `command_sampling`, which count as requested too, and then from `defaults`. The canvas or suffix of `terms` and
        the `affixes` are those of `response_of`. Raises `ConfigError` if they and the parameters contradict each other.
        """
        if isinstance(sampling, SamplingParams):
            if terms.canvas is not None or terms.suffix is not None:
                raise ConfigError(
                    "params: a response with fixed parts takes a mapping, such as {'temperature': 0.5}, which leaves "
                    "the rest to it; SamplingParams are complete"
                )
            return sampling, None
        if not isinstance(sampling, Mapping):
            raise ConfigError(
                "params must be SamplingParams, or a mapping such as {'temperature': 0.5}, for all prompts or one for "
                f"each, got {shown(sampling)}"
            )
        config = self.loaded.config
        base = command_sampling or {}
        if config.causal_prefix:
            base = restrict_to_mode(base, sampling.get("mode"))

        def resolve(requested: Mapping[str, Any], fixed_tokens: int, template: Template | None) -> SamplingParams:
            return self.params({**base, **requested}, defaults, prompt_tokens=fixed_tokens, template=template)

        return response_of(
            terms,
            sampling,
            prompt_tokens,
            tokenizer=self.tokenizer,
            stop_ids=config.stop_ids,
            resolve=resolve,
            max_length=self.engine.max_model_len,
            affixes=affixes,
        )

    def default_cache(
        self, adapter: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> tuple[str | CachePolicy, Mapping[str, Any]]:
        """Return the cache of requests that name none, and its settings; `settings` replace the session's.

        Without depths for `adapter`, the inner policy replaces a `bicache` that the user did not choose, which is
        logged once for each adapter. Raises `UnknownNameError` on an unknown adapter.
        """
        if settings is None:
            settings = self.cache_config
        cache = self._auto_cache
        if not isinstance(cache, str):
            return self.cache, settings
        outer, _, inner = cache.partition("+")
        if settings or outer != "bicache":
            return cache, settings
        if adapter not in self._auto_cache_by_adapter:
            if not self.earns_depths and self.depth_table_of(adapter) is None:
                cache = inner or "none"
                name = self.loaded.name if adapter is None else f"{self.loaded.name} with {adapter}"
                log.info(NO_TABLE, name, cache, self.loaded.name)
            self._auto_cache_by_adapter[adapter] = cache
        return self._auto_cache_by_adapter[adapter], settings

    def policy_of_arguments(
        self, cache: str | CachePolicy | None, settings: Mapping[str, Any] | None, adapter: str | None
    ) -> CachePolicy:
        """The policy that Python arguments name; they may name a file or no cache. Raises `ConfigError`."""
        if cache is None:
            return self.policy(*self.default_cache(adapter, settings or None), adapter=adapter)
        return self.policy(*from_file(cache, settings), adapter=adapter)

    def policy_of(self, terms: Terms) -> CachePolicy:
        """The policy that a request in JSON names; it may not name a file. Raises `ConfigError`."""
        if terms.cache is None:
            return self.policy(*self.default_cache(terms.adapter, terms.cache_config), adapter=terms.adapter)
        return self.policy(terms.cache, terms.cache_config, adapter=terms.adapter)

    def plan_decisions(self, decisions: Decisions, max_canvases: int | None = None) -> DecisionPlan:
        """Plan the passes that answer `decisions`. Safe on any thread.

        Raises `ConfigError` if a question cannot be answered, and if they need more than `max_canvases`.
        """
        config = self.loaded.config
        Reading.check_kind(config.kind, config.family)
        if self.tokenizer is None:
            raise ConfigError("decisions need a tokenizer, and this model folder has none")
        return DecisionPlan.of(decisions, self.tokenizer, config.mask_id, max_canvases)

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
        """Return the requests of `generate`, `chat` and `infill`. Their ids are their numbers, from "0".

        All have the same `terms` and `policy`, by default the default ones; `params` are for all or one for each, and
        `canvases` are one for each. `variables` are those of the chat template, and conversations end as in `chat`.
        Raises `ConfigError` if a prompt or a setting cannot be used.
        """
        items = as_prompts(prompts)
        terms = terms or Terms()
        sampling = list(params) if isinstance(params, Sequence) else [params] * len(items)
        for name, values in (("canvas", canvases), ("params", sampling)):
            if values is not None and len(values) != len(items):
                raise ConfigError(f"{name}: one for all prompts or one per prompt ({len(items)}), got {len(values)}")
        policy = policy or self.policy(*self.default_cache(terms.adapter), adapter=terms.adapter)
        requests = []
        for index, (prompt, item) in enumerate(zip(items, sampling, strict=True)):
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
            beginning: str = prompt[-1]["content"] if continue_final_message else ""  # type: ignore[index]
            request = self.request(str(index), tokens, shared, item or {}, terms, policy, beginning=beginning)
            requests.append(request.with_readers(*readers))
        return requests

    def request(
        self,
        request_id: str,
        tokens: Sequence[int],
        prefix_length: int,
        sampling: Sampling,
        terms: Terms,
        policy: CachePolicy,
        *,
        command_sampling: Mapping[str, Any] | None = None,
        beginning: str = "",
    ) -> Request:
        """The request of a prompt of `tokens`, whose first `prefix_length` are the shared prefix by default.

        `response` resolves `sampling` and `command_sampling`. The answer continues the text `beginning`, with which the
        prompt ends. Raises `ConfigError` as `response` and `constraint`.
        """
        params, template = self.response(terms, sampling, len(tokens), command_sampling=command_sampling)
        constraint = self.constraint(terms.structured_outputs, beginning)
        return request_of(
            request_id,
            tokens,
            params,
            policy,
            terms,
            self.loaded.config,
            prefix_length=prefix_length,
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
            progress: whether to show a progress bar on stderr; None: as the session does.

        The first `next` raises `ConfigError`, before any request runs, if one cannot run or the engine is not idle.
        """
        show_progress = self.progress if progress is None else progress
        requests_by_id = {request.id: request for request in requests}
        progress_bar = Progress("answering", len(requests), "requests", enabled=show_progress)
        token_count = 0
        with closing(events_of(requests, engine or self.engine)) as steps, progress_bar as bar:
            for step_count, events in enumerate(steps, 1):
                token_count += sum(len(event.transfer.positions) for event in events if event.transfer is not None)
                bar.update(0, f"step {step_count}, {token_count} tokens")
                for event in events:
                    if event.result is not None:
                        bar.update()
                        yield Output.of(requests_by_id[event.id], event.result, self.tokenizer, trace=trace)


def check_idle(engine: Engine) -> None:
    """Raise `ConfigError` if `engine` has requests."""
    if engine.busy:
        raise ConfigError("the engine is running other requests; exhaust or close that run, or use new_engine()")


def events_of(requests: Sequence[Request], engine: Engine) -> Generator[list[Event], None, None]:
    """Run requests, and yield the events of each step. A consumer that stops early cancels them.

    The first `next` raises `ConfigError`, before any request runs, if one cannot run or the engine is not idle.
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
    """Run one step. Returns its events; none after an error, from which the engine recovers."""
    try:
        return engine.step()
    except Exception as error:
        engine.recover(error)
        return []
