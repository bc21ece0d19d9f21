"""Answers of OpenAI's chat and text completions: choices, whole or chunk by chunk."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from remask.answers.answer import Delta, Scored, trace_of
from remask.errors import RemaskError
from remask.request.trace import TokenLogprob, step_map
from remask.server.answers.base import Json, RunningUsage, Usage, running_usage, usage, work
from remask.server.answers.choice_types import ChatLogprobs, CompletionLogprobs
from remask.server.answers.generation import DONE, Generation, failed_stream, json_event
from remask.server.tools import CallPiece, whole_calls


class Choices(Generation):
    """What both have in common. The arguments are those of `Generation`."""

    prefix: ClassVar[str]  # of the ids of answers
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, *told: Any) -> None:
        super().__init__(*told)
        self._told = [0] * len(self.answers)  # tokens of each choice so far
        self._repeated = self.body.continued if self.body.echo else ""

    @abstractmethod
    def _opening_choice(self, index: int) -> Json | None:
        """The choice that a stream begins with; None if it begins with none."""

    @abstractmethod
    def _part(self, delta: Delta, scored: Sequence[Scored] | None) -> Json:
        """A choice that carries settled text, and the log-probabilities of its tokens where they are asked for."""

    @abstractmethod
    def _end(self, index: int, finish: str) -> Json:
        """The choice that says why it ended."""

    @abstractmethod
    def _whole(
        self, index: int, text: str, scored: Sequence[Scored] | None, finish: str, calls: Sequence[CallPiece]
    ) -> Json:
        """A choice that is not streamed."""

    @abstractmethod
    def _add_prompts(self, answer: Json, prompts: list[list[int]]) -> None:
        """Put the token ids of each choice's prompt where vLLM puts them."""

    async def response(self) -> Json:
        texts = [self._repeated] * len(self.answers)
        scored: list[list[Scored]] = [[] for _ in self.answers]
        calls: list[list[CallPiece]] = [[] for _ in self.answers]
        async for deltas in self._steps():
            for delta in deltas:
                texts[delta.index] += delta.text
                scored[delta.index] += delta.scored
                calls[delta.index] += delta.calls
        choices = [
            self._whole(i, texts[i], scored[i] if self.scored else None, self._finish(i), calls[i]) | self._extras(i)
            for i in range(len(self.answers))
        ]
        if self.body.return_token_ids:
            for choice, answer, result in zip(choices, self.answers, self.ordered, strict=True):
                shown = answer.request.response.shown(len(result.token_ids))
                choice["token_ids"] = [result.token_ids[place] for place in shown]
        whole = self._with_prompts(self._answer(choices, self.whole_object))
        return {**whole, "usage": self._usage(), "remask": work(self.ordered)}

    def _opening(self) -> list[bytes]:
        choices = [self._opening_choice(answer.index) for answer in self.answers]
        chunks = [self._chunk([choice]) for choice in choices if choice is not None]
        if self.body.return_token_ids:
            empty = [self._part(Delta(answer.index), None) for answer in self.answers]
            chunks.append(self._with_prompts(self._chunk(empty)))
        if self.body.stream_drafts:
            layout = {
                "prompts": [answer.prompt for answer in self.answers],
                "blocks": [answer.blocks for answer in self.answers],
            }
            chunks.append(self._chunk([]) | {"remask": layout})
        return [self._encoded(chunk) for chunk in chunks]

    def _chunks(self, delta: Delta) -> list[bytes]:
        chunks = []
        self._told[delta.index] += len(delta.tokens)
        told = delta.tokens and (self.scored or self.body.return_token_ids)
        if delta.text or delta.calls or told or delta.canvas is not None:
            choice = self._part(delta, delta.scored if self.scored else None)
            if self.body.return_token_ids:
                choice["token_ids"] = delta.tokens
            shown = {} if delta.canvas is None else {"remask": {"index": delta.index, **delta.canvas}}
            chunks.append(self._chunk([choice]) | shown)
        if delta.result is not None:
            end = self._end(delta.index, self._finish(delta.index))
            chunks.append(self._chunk([end | self._extras(delta.index)]))
        return [self._encoded(chunk) for chunk in chunks]

    def _closing(self) -> list[bytes]:
        if not self._include_usage:
            return [DONE]
        return [json_event(self._chunk([]) | {"usage": self._usage(), "remask": work(self.ordered)}), DONE]

    def _failed(self, error: RemaskError) -> bytes:
        return failed_stream(error)

    def _finish(self, index: int) -> str:
        """Why a choice has ended, in the words of OpenAI's chat completions."""
        reason = self.results[index].finish_reason
        return self._readers[index].finish_reason(reason) if self._readers else reason

    def _extras(self, index: int) -> Json:
        """What a choice carries beside OpenAI's keys once it has ended: the texts of its canvas' holes, its step maps
        and its trace, if asked for.
        """
        request, result, told = self.answers[index].request, self.results[index], Json()
        if self.terms.return_step_maps:
            steps = step_map(result.trace, len(request.prompt_token_ids), len(result.token_ids))
            told["step_maps"] = [steps[place] for place in request.response.shown(len(steps))]
        if self.terms.return_trace:
            told["trace"] = trace_of(request, result.trace, result.usage, self.fingerprint).content
        holes = self.answers[index].holes
        return ({} if holes is None else {"holes": holes}) | ({"remask": told} if told else {})

    def _with_prompts(self, answer: Json) -> Json:
        """`answer`, or the first chunk of a stream, with the prompts' token ids where they are asked for."""
        if self.body.return_token_ids:
            self._add_prompts(answer, [list(each.request.prompt_token_ids) for each in self.answers])
        return answer

    @property
    def _include_usage(self) -> bool:
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    def _usage(self) -> Usage:
        return usage(self.ordered, self.body.n or 1)

    def _usage_so_far(self) -> RunningUsage | None:
        if self.body.stream_options is None or not self.body.stream_options.continuous_usage_stats:
            return None
        prompts = self.answers[:: self.body.n or 1]
        return running_usage(sum(len(each.request.prompt_token_ids) for each in prompts), sum(self._told))

    def _answer(self, choices: list[Json], kind: str) -> Json:
        """An answer, or a chunk of a stream, without what stands behind its choices."""
        names = self.names
        return {
            "id": f"{self.prefix}-{names.id}",
            "object": kind,
            "created": names.created,
            "model": names.model,
            "system_fingerprint": names.fingerprint,
            "choices": choices,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        return self._answer(choices, self.chunk_object)

    def _encoded(self, chunk: Mapping[str, Any]) -> bytes:
        # With `include_usage`, all of OpenAI's chunks have the key `usage`; only the last one has a value, but for what
        # vLLM's `continuous_usage_stats` asks for.
        return json_event({**chunk, "usage": self._usage_so_far()} if self._include_usage else chunk)


class ChatChoices(Choices):
    """Answers of `/v1/chat/completions`."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _opening_choice(self, index: int) -> Json:
        return self._streamed(index, {"role": "assistant", "content": self._repeated})

    def _part(self, delta: Delta, scored: Sequence[Scored] | None) -> Json:
        said: Json = {"tool_calls": [call.streamed for call in delta.calls]} if delta.calls else {}
        if delta.text or not delta.calls:
            said["content"] = delta.text
        return self._streamed(delta.index, said, scored)

    def _end(self, index: int, finish: str) -> Json:
        return self._streamed(index, {}, finish=finish)

    def _whole(
        self, index: int, text: str, scored: Sequence[Scored] | None, finish: str, calls: Sequence[CallPiece]
    ) -> Json:
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": (text.strip() and text) or None, "tool_calls": whole_calls(calls)}
        return {"index": index, "message": message, "logprobs": self._logprobs(scored), "finish_reason": finish}

    def _add_prompts(self, answer: Json, prompts: list[list[int]]) -> None:
        answer["prompt_token_ids"] = prompts[0]  # all choices have one prompt, which stands beside them

    def _streamed(
        self, index: int, delta: Json, scored: Sequence[Scored] | None = None, finish: str | None = None
    ) -> Json:
        return {"index": index, "delta": delta, "logprobs": self._logprobs(scored), "finish_reason": finish}

    def _logprobs(self, scored: Sequence[Scored] | None) -> ChatLogprobs | None:
        return None if scored is None else {"content": [self.names.scored(item) for item in scored], "refusal": None}


class CompletionChoices(Choices):
    """Answers of `/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _opening_choice(self, index: int) -> None:
        """They begin with their text."""

    def _part(self, delta: Delta, scored: Sequence[Scored] | None) -> Json:
        return self._whole(delta.index, delta.text, scored, None)

    def _end(self, index: int, finish: str) -> Json:
        return self._whole(index, "", None, finish)

    def _whole(
        self,
        index: int,
        text: str,
        scored: Sequence[Scored] | None,
        finish: str | None,
        calls: Sequence[CallPiece] = (),  # noqa: ARG002 - completions call no tools
    ) -> Json:
        scores = None if scored is None else self._logprobs(scored)
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish}

    def _add_prompts(self, answer: Json, prompts: list[list[int]]) -> None:
        for choice in answer["choices"]:
            choice["prompt_token_ids"] = prompts[choice["index"]]

    def _logprobs(self, scored: Sequence[Scored]) -> CompletionLogprobs:
        reads = [item.read for item in scored]
        return {
            "tokens": [self.names.spelled(read.token_id) for read in reads],
            "token_logprobs": [read.logprob for read in reads],
            "top_logprobs": [self._top(read) for read in reads] if any(read.top for read in reads) else None,
            "text_offset": [item.offset for item in scored],
            "steps": [read.step for read in reads],
        }

    def _top(self, read: TokenLogprob) -> dict[str, float]:
        """The most probable tokens, and the chosen one; of tokens with one text the most probable."""
        found: dict[str, float] = {}
        for token, logprob in sorted({*read.top, (read.token_id, read.logprob)}, key=lambda pair: -pair[1]):
            found.setdefault(self.names.spelled(token), logprob)
        return found
