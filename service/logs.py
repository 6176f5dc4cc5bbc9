"""JSON log lines, one object each, on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time

logger = logging.getLogger("thimble")


class _JsonFormatter(logging.Formatter):
    """Time (UTC), level, event and the record's own `fields`; never text or names that came from a client."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {"time": f"{stamp}.{int(record.msecs):03}Z", "level": record.levelname.lower()}
        line["event"] = record.getMessage()
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logs() -> None:
    """Send every logger of the process through the JSON formatter."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    # uvicorn tells every start-up step at INFO; its warnings and errors are what an operator wants.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
