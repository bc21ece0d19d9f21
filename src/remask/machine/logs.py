"""The form of log lines: text for people, or an object of JSON a line for what collects logs."""

import json
import logging
from datetime import UTC, datetime

TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonFormatter(logging.Formatter):
    """Makes of each record one line of JSON: time (ISO 8601, UTC), level, logger, message, and exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, in ASCII. A traceback or a stack is text of several lines in one of its values."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line)


def logs_json() -> bool:
    """Whether this process logs JSON, which processes that it starts should do as well."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
