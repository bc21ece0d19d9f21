"""Bodies of decisions, scores and rankings, which read the model's distribution and generate nothing."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from remask.checks.fields import declared
from remask.checks.values import LARGEST
from remask.errors import ConfigError
from remask.request.questions import Decisions
from remask.request.terms import Terms
from remask.server.fields import FOREIGN_TO_READS
from remask.server.protocol.base import MAX_NAME, Body, Checked, LongText, Name, Texts, declared_fields, with_declared

_TERMS = declared(Terms)
JEV = re.compile(r"jev(-[\w.-]+)?")
"""System One's own names of models."""
JEV_LATEST = "jev-latest"
RELEVANCE = "Does the document answer the query?"


class ReadBody(Body):
    """What the bodies of decisions, scores and rankings have in common. They take no sampling parameters.

    `names` are what a body calls the fields of decisions that it is read as.
    """

    model: Name | None = None
    user: Name | None = None
    cache: Annotated[str | None, Checked("cache", _TERMS["cache"])] = None
    cache_config: Annotated[dict[str, Any] | None, Checked("cache_config", _TERMS["cache_config"])] = None
    adapter: Annotated[str | None, Checked("adapter", _TERMS["adapter"])] = None
    cache_salt: Annotated[str | None, Checked("cache_salt", _TERMS["cache_salt"])] = None
    priority: Annotated[int | None, Checked("priority", _TERMS["priority"])] = None
    deadline_s: Annotated[float | None, Checked("deadline_s", _TERMS["deadline_s"])] = None
    foreign = FOREIGN_TO_READS
    names: ClassVar[Mapping[str, str]] = {}

    @property
    def terms(self) -> Terms:
        """The terms of the requests for its canvases."""
        names = ("cache", "cache_config", "adapter", "cache_salt", "priority")
        return Terms(**{name: getattr(self, name) for name in names if getattr(self, name) is not None})

    @property
    def state_name(self) -> str:
        """The field that holds what the questions are about, for errors."""
        return self.names["state"]

    @property
    def questions_count(self) -> int:
        """How many questions it asks."""
        raise NotImplementedError


@with_declared(Decisions)
class DecisionsBody(ReadBody):
    """Body of `/v1/decisions`: OpenAI's, with `input`, or System One's, with `state`.

    Requests of one `prompt_cache_key` share stored prefixes with each other alone.
    """

    prompt_cache_key: Name | None = None

    @property
    def terms(self) -> Terms:
        terms = super().terms
        key = self.prompt_cache_key
        if key is None:
            return terms
        salt = json.dumps([terms.cache_salt, key])
        if len(salt) > MAX_NAME:  # more than a salt may have: a digest of it keeps partitions as apart
            salt = hashlib.sha256(salt.encode()).hexdigest()
        return replace(terms, cache_salt=salt)

    @property
    def state_name(self) -> str:
        return "state" if self.input is None else "input"  # type: ignore[attr-defined]

    @property
    def questions_count(self) -> int:
        return len(self.questions or ())  # type: ignore[attr-defined]

    @property
    def decisions(self) -> Decisions:
        """The decisions. Raises `ConfigError` on an invalid question."""
        return Decisions(**declared_fields(self, Decisions))


class SystemOneBody(DecisionsBody):
    """Body of `/v1/systemone`: `state` and `questions` by their ids. Unknown fields are ignored, as that API does.

    A `model` of that API's own names, such as `jev-latest`, is the model that is served.
    """

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        """Remove unknown fields, and a `model` of System One's. Raises `ConfigError` if a required one is missing."""
        if not isinstance(body, Mapping):
            return body
        FOREIGN_TO_READS["assets"].check("assets", body.get("assets"))
        for name in ("state", "questions"):
            if body.get(name) is None:
                raise ConfigError(f"{name} is missing; send it")
        names = cls.model_fields.keys() - {"input"}  # OpenAI's name of `state`, and so none that is known here
        fields = {name: value for name, value in body.items() if name in names and value is not None}
        model = fields.get("model")
        if isinstance(model, str) and JEV.fullmatch(model):
            del fields["model"]
        return fields


class RelevanceBody(ReadBody):
    """What the bodies of scores and rankings have in common."""

    instructions: LongText = RELEVANCE
    labels: Annotated[list[Name], Field(min_length=2, max_length=2)] | None = None
    names: ClassVar[Mapping[str, str]] = {"state": "query", "questions": "documents"}


class ScoreBody(RelevanceBody):
    """Body of `/v1/score`: one query and its documents, or as many queries as documents.

    `text_1` and `text_2` are the older names of `queries` and `documents`.
    """

    queries: LongText | Texts | None = None
    documents: LongText | Texts | None = None
    text_1: LongText | Texts | None = None
    text_2: LongText | Texts | None = None
    names: ClassVar[Mapping[str, str]] = {"state": "queries", "questions": "documents"}

    @property
    def state_name(self) -> str:
        return "text_1" if self.queries is None else "queries"

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """The queries and the documents. Raises `ConfigError` if their numbers do not match."""
        sides = []
        for new, old in (("queries", "text_1"), ("documents", "text_2")):
            values = [value for value in (getattr(self, new), getattr(self, old)) if value is not None]
            if len(values) != 1:
                raise ConfigError(f"{new} and {old} are two names of one thing; send one of them")
            sides.append([values[0]] if isinstance(values[0], str) else list(values[0]))
        queries, documents = sides
        if not documents or len(queries) not in (1, len(documents)):
            raise ConfigError(
                f"documents: {len(queries)} queries and {len(documents)} documents; send one query, or as many as "
                "documents, and one document at least"
            )
        return queries, documents

    @property
    def questions_count(self) -> int:
        """How many pairs it has."""
        return len(self.pairs[1])


class RerankBody(RelevanceBody):
    """Body of `/v1/rerank`. Without `top_n` all documents are returned, and 0 asks for all too."""

    query: LongText
    documents: Annotated[Texts, Field(min_length=1)]
    top_n: Annotated[int | None, Field(ge=0, le=LARGEST)] = None

    @property
    def questions_count(self) -> int:
        """How many documents it has."""
        return len(self.documents)
