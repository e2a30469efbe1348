"""Intake: from a file of requests to a batch in the store, or to a report of every line that cannot be accepted."""

from producers.intake.again import submit_again
from producers.intake.bulk import submit_many
from producers.intake.options import Options
from producers.intake.refusals import LineError, Rejected, Report
from producers.intake.spool import recover, shard_of
from producers.intake.submission import submit, submit_bytes, submit_stream, validate

__all__ = [
    "LineError",
    "Options",
    "Rejected",
    "Report",
    "recover",
    "shard_of",
    "submit",
    "submit_again",
    "submit_bytes",
    "submit_many",
    "submit_stream",
    "validate",
]
