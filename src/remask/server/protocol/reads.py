"""Bodies of decisions, scores and rankings, which read the model's distribution and generate nothing."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from remask.checks.fields import declared
from remask.checks.values import LARGEST
from remask.errors import ConfigError
from remask.request.questions import Decisions
from remask.request.terms import Terms
from remask.server.fields import FOREIGN_TO_READS
from remask.server.protocol.base import Body, Checked, LongText, Name, Texts, given, with_declared

_TERMS = declared(Terms)
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
        """The terms of each of its canvases."""
        names = ("cache", "cache_config", "adapter", "cache_salt", "priority")
        return Terms(**{name: getattr(self, name) for name in names if getattr(self, name) is not None})

    @property
    def questions_count(self) -> int:
        """How many questions it asks."""
        raise NotImplementedError


@with_declared(Decisions)
class DecisionsBody(ReadBody):
    """Body of `/v1/decisions`."""

    @property
    def questions_count(self) -> int:
        return len(self.questions or ())  # type: ignore[attr-defined]

    @property
    def asked(self) -> Decisions:
        """The decisions. Raises `ConfigError` on a question that cannot be asked."""
        return Decisions(**given(self, Decisions))


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
    def pairs(self) -> tuple[list[str], list[str]]:
        """The queries and the documents. Raises `ConfigError` where they do not go together."""
        sides = []
        for new, old in (("queries", "text_1"), ("documents", "text_2")):
            found = [each for each in (getattr(self, new), getattr(self, old)) if each is not None]
            if len(found) != 1:
                raise ConfigError(f"{new} and {old} are two names of one thing; send one of them")
            sides.append([found[0]] if isinstance(found[0], str) else list(found[0]))
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
