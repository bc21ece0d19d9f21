"""The Python interface."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, get_type_hints

import pytest

from remask import LLM, EngineConfig, RemaskError, SamplingParams
from remask.checkpoint.settings import Loading, LoadSettings
from remask.checks.fields import declared
from remask.engine.engine import Engine
from remask.errors import ConfigError, UnknownNameError
from remask.policies.dense import Dense
from remask.readers.logprobs import Logprobs
from remask.request.forms import StructuredOutputs
from remask.request.terms import TermKeywords, Terms
from remask.session import RequestKeywords
from tests.goldens import model_dir, request_line, runs
from tests.sampling_fields import flat_params

SAMPLING = SamplingParams(max_tokens=16, steps=8, block_length=2)


@pytest.fixture(scope="module")
def bundled() -> LLM:
    return LLM("bundled-transit", dtype="float32")


@pytest.fixture(scope="module")
def golden() -> LLM:
    return LLM(str(model_dir("llada")), dtype="float32", cache="bicache", cache_config={"depth": 2})


def test_token_ids_in_a_golden_answer_out(golden: LLM) -> None:
    run = next(r for r in runs("llada_bicache", {"bicache"}) if r["params"]["b"] == 2 and r["params"]["interval"] == 16)
    line = request_line(run, "x")
    params = flat_params(line["sampling"])
    (output,) = golden.generate(line["prompt_token_ids"], params, prefix_length=run["prefix_len"], trace=True)
    assert list(output.token_ids) == run["output_ids"]
    assert output.text is None
    assert output.trace is not None
    assert output.usage.prefix_depth == 2


def test_log_probabilities_of_outputs(golden: LLM) -> None:
    params = SamplingParams(max_tokens=6)
    plain, told = (golden.generate([3, 4, 5], params, top_logprobs=top)[0] for top in (None, 4))
    assert plain.logprobs is None
    assert told.logprobs is not None
    assert tuple(read.token_id for read in told.logprobs) == told.token_ids == plain.token_ids
    assert all(read.top[0] == (read.token_id, read.logprob) and len(read.top) == 4 for read in told.logprobs)
    with pytest.raises(RemaskError, match="top_logprobs must be a whole number from 0 to 20"):
        golden.generate([3], params, top_logprobs=21)


def test_text_and_messages_give_text(bundled: LLM) -> None:
    message = {"role": "user", "content": "from abbey go 1 , where am i ?"}
    texts = bundled.generate(["from abbey go 1 , where am i ?", "where am i ?"], SAMPLING)
    assert [output.id for output in texts] == ["0", "1"]
    (chat,) = bundled.generate([message], SAMPLING)
    assert isinstance(chat.text, str)
    assert chat.trace is None
    assert chat.finish_reason in ("stop", "length")


def test_many_conversations_share_their_system_prompt(bundled: LLM) -> None:
    system = {"role": "system", "content": "abbey > acorn ; acorn > alder ; alder > abbey ;"}
    chats = [[system, {"role": "user", "content": f"from {stop} go 1 , where am i ?"}] for stop in ("abbey", "acorn")]
    first, second = bundled.generate(chats, SAMPLING, cache="reuse")
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens > 0
    none = bundled.generate(chats, SAMPLING, prefix_length=0, cache="reuse")
    assert [output.usage.cached_tokens for output in none] == [0, 0]


def test_parameters_per_prompt(golden: LLM) -> None:
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    each = [SamplingParams(max_tokens=4, ignore_eos=True), SamplingParams(max_tokens=8, ignore_eos=True)]
    outputs = golden.generate(prompts, each)
    assert [len(output.token_ids) for output in outputs] == [4, 8]
    with pytest.raises(RemaskError, match="one per prompt"):
        golden.generate(prompts, each[:1])


def test_a_bad_prompt_leaves_nothing_behind(golden: LLM) -> None:
    with pytest.raises(RemaskError, match="prompt_token_ids holds 999"):
        golden.generate([[1, 2], [999]], SamplingParams(max_tokens=4))
    assert not golden.engine.busy
    golden.engine.check_integrity()
    assert len(golden.generate([[1, 2]], SamplingParams(max_tokens=4, ignore_eos=True))) == 1


def test_a_consumer_that_stops_early_frees_everything(golden: LLM) -> None:
    work = golden.session.requests([[1, 2], [3, 4]], SamplingParams(max_tokens=8, ignore_eos=True))
    stream = golden.session.run(work)
    next(stream)
    stream.close()
    assert not golden.engine.busy
    golden.engine.check_integrity()


def test_stop_texts_are_cut_from_text_and_end_the_tokens(bundled: LLM) -> None:
    prompt = "from abbey go 1 , where am i ?"
    (whole,) = bundled.generate(prompt, SamplingParams(max_tokens=16, steps=16, ignore_eos=True))
    assert whole.text is not None
    words = whole.text.split()
    stop = next((word for word in words[1:]), words[0])
    (cut,) = bundled.generate(prompt, SamplingParams(max_tokens=16, steps=16, ignore_eos=True, stop=[stop]))
    assert cut.finish_reason == "stop"
    assert cut.text is not None
    assert stop not in cut.text
    assert whole.text.startswith(cut.text)
    assert len(cut.token_ids) <= len(whole.token_ids)


def test_one_line_at_start_up_names_every_resolved_choice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="remask.llm"):
        LLM("llada-tiny", cache="none", load_format="dummy", engine=EngineConfig(max_num_seqs=3))
    (record,) = [record for record in caplog.records if record.name == "remask.llm"]
    parts = ["model=llada-tiny", "family=llada", "dtype=", "device=", "max_num_seqs=3", "max_model_len="]
    for part in (*parts, "auto: ", "attention=torch (auto: device cpu)"):
        assert part in record.getMessage()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"load_format": "dumy"}, "Did you mean 'dummy'"),
        ({"dtype": "int4"}, "Unknown dtype"),
        ({"device": "nowhere"}, "device 'nowhere' cannot be used"),
        ({"cache": "fast"}, "Unknown cache policy"),
        (
            {"cache": "none", "engine": EngineConfig(audit=0.5)},
            "the cache 'none' computes what an audit",
        ),
        ({"model": "sdar-tiny", "engine": EngineConfig(audit=0.5)}, "the cache 'exact' computes what an audit"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(RemaskError, match=text):
        LLM(**{"model": "llada-tiny", "load_format": "dummy", **settings})


def test_settings_of_loading_are_keywords_of_their_types() -> None:
    settings, keywords = get_type_hints(LoadSettings), get_type_hints(Loading)
    assert {name: settings[name] for name in declared(LoadSettings)} == keywords
    with pytest.raises(UnknownNameError, match="Did you mean 'quantization'"):
        LLM("llada-tiny", quantisation="int8")  # type: ignore[call-arg]
    assert "max_num_seqs: Canvases that run at a time" in str(EngineConfig.__doc__)
    assert "quantization: Quantize the weights" in str(LoadSettings.__doc__)


def test_terms_are_keywords_of_their_types() -> None:
    terms, keywords = get_type_hints(Terms), get_type_hints(TermKeywords)
    apart = {"cache", "canvas", "return_trace", "return_step_maps"}
    assert list(keywords) == [name for name in declared(Terms) if name not in apart]
    form = keywords.pop("structured_outputs")
    assert form == StructuredOutputs | Mapping[str, Any] | None
    assert {name: terms[name] for name in keywords} == keywords
    assert "priority: Requests of lower priority numbers" in str(Terms.__doc__)


def test_every_method_takes_the_terms(bundled: LLM) -> None:
    """They reach the request, and what is no term is refused by its name."""
    terms: RequestKeywords = {"priority": 3, "cache_salt": "a", "deadline_s": 60.0, "top_logprobs": 1}
    terms |= {"prefix_length": 0, "suffix": " , abbey ;", "control_tokens": False, "cache": Dense()}
    request = bundled.session.stream_request("go 1", {"max_tokens": 2}, **terms)
    asked = (request.priority, request.cache_salt, request.deadline_s, request.prefix_length, request.find_prefix)
    assert asked == (3, "a", 60.0, 0, False)
    assert request.reader(Logprobs) is not None
    assert len(request.response) > 2 == request.response.open_places
    (output,) = bundled.generate("go 1", {"max_tokens": 2}, **terms)
    *_, last = bundled.stream("go 1", {"max_tokens": 2}, **terms)
    assert last.output is not None
    assert output.text == last.output.text
    assert output.logprobs is not None
    with pytest.raises(RemaskError, match="a response with fixed parts takes a mapping"):
        bundled.generate("go 1", SAMPLING, suffix="x")
    with pytest.raises(RemaskError, match="canvas and suffix both say"):
        bundled.infill("go 1", [{"mask": 2}], suffix="x")
    for method in (bundled.generate, bundled.chat, bundled.infill, bundled.session.stream_request):
        call: Any = method
        with pytest.raises(UnknownNameError, match=r"Unknown argument 'prioriti'. Did you mean 'priority'"):
            call([{"role": "user", "content": "go"}], [{"mask": 2}], prioriti=1)
        with pytest.raises(ConfigError, match=r"max_tokens is a sampling .* in params, as params=\{'max_tokens': 2\}"):
            call([{"role": "user", "content": "go"}], [{"mask": 2}], max_tokens=2)


def test_a_new_engine_shares_the_weights_alone(golden: LLM) -> None:
    other = golden.session.new_engine(EngineConfig(max_num_seqs=1))
    assert isinstance(other, Engine)
    assert other.model is golden.model
    assert other.store is not golden.engine.store
    assert other.pool is not golden.engine.pool


def test_the_public_members_are_few() -> None:
    """What servers and measurements need beside stands in `LLM.session`."""
    public = {name for name in vars(LLM) if not name.startswith("_")}
    asked = {"generate", "chat", "stream", "infill", "decide", "close"}
    assert public == asked | {"depth_table", "tokenizer", "loaded", "model", "engine"}


class Bad(NamedTuple):
    """Arguments of a method that it refuses."""

    method: str
    arguments: tuple[Any, ...]
    message: str
    keywords: Mapping[str, Any] = {}


CHAT = [{"role": "user", "content": "a"}]
BAD = [
    *(
        Bad("generate", (prompts,), "a prompt must be a text, a list")
        for prompts in (5, None, b"ab", {"a"}, [None], [b"a"])
    ),
    Bad("stream", (5.5,), "a prompt must be a text, a list"),
    Bad("generate", ("a", 5), "params must be SamplingParams, or a mapping"),
    Bad("generate", ("a", [5]), "params must be SamplingParams, or a mapping"),
    *(Bad("infill", ("a", canvas), "canvas must be a list of parts") for canvas in ({"mask": 4}, None, "ab")),
    Bad("chat", (CHAT,), "chat_template_kwargs must be an object", {"chat_template_kwargs": [1]}),
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_arguments_of_another_kind_are_refused_by_name(bundled: LLM, bad: Bad) -> None:
    with pytest.raises(ConfigError, match=bad.message):
        list(getattr(bundled, bad.method)(*bad.arguments, **bad.keywords))
