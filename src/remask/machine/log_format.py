"""The form of log lines: text for people, or an object of JSON a line for what collects logs."""

import json
import logging
from datetime import UTC, datetime
from typing import Any

TEXT = "%(asctime)s %(levelname)s %(message)s"
FIELDS = "fields"  # the key of `extra` under which a log call hands over values that its message has as text


class JsonFormatter(logging.Formatter):
    """Makes of each record one line of JSON.

    Its keys: time (ISO 8601, UTC), level, logger, process (its id) and message; exception, a traceback, and fields,
    what the message says as values of its own, where the record has them.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, in ASCII. A traceback or a stack is text of several lines in one of its values."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if (fields := getattr(record, FIELDS, None)) is not None:
            line[FIELDS] = fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line)


def logs_json() -> bool:
    """Whether this process logs JSON, which processes that it starts should do as well."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
