"""The one line that tells what became of a job: sizes, seconds per stage, outcome; no name and no text."""

from __future__ import annotations

from service.errors import ServiceError
from service.jobs import Job
from service.logs import logger
from service.protocol import Failed, Finished


def log_job(job: Job, outcome: Finished | ServiceError, answer: Failed | None) -> None:
    """Log a job that is over; `answer` is the worker's, where it gave the job up."""
    fields: dict[str, object] = {"job": job.id, "outcome": job.state.value, "bytes": job.n_bytes}
    fields |= {"attempts": job.attempts, "upload_seconds": round(job.upload_seconds, 3)}
    fields["queue_seconds"] = round(job.queue_seconds, 3)
    if isinstance(outcome, Finished):
        fields |= {"audio_seconds": round(outcome.seconds, 3), "processing_seconds": round(outcome.processing_seconds, 3)}
        fields |= {"tokens": outcome.n_tokens, "partial": outcome.is_partial}
        timings = outcome.timings
    else:
        fields["code"] = outcome.code
        timings = answer.timings if answer else {}
        if answer and answer.cause:
            fields["cause"] = answer.cause
    fields |= {name: timings.get(name, 0) for name in ("fallbacks", "loops", "silent_windows", "repairs")}
    fields["stages"] = {name: round(seconds, 3) for name, seconds, _ in timings.get("stages", [])}
    logger.info("job", extra={"fields": fields})
