"""Intake: from a file of requests to a batch in the store, or to a report of every line that cannot be accepted.

What makes many batches at a time (`bulk`), and one out of another's rows (`again`), is not among what every command
imports that takes a file.
"""

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
    "submit_bytes",
    "submit_stream",
    "validate",
]
