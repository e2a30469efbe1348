"""What a person may say about a batch besides its file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from common.errors import UsageError
from common.settings import TENANT
from producers import schedule
from producers.batch import PRIORITIES

#: Of OpenAI's metadata: pairs, characters of a key, characters of a value.
_METADATA_LIMITS = (16, 64, 512)


@dataclass(frozen=True)
class Options:
    """None stands for what the settings have."""

    model: str | None = None
    name: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    skip_invalid: bool = False
    max_tokens_default: int | None = None
    cache: str | None = None
    timeout_s: float | None = None
    idempotency_key: str | None = None
    #: True: with another file the same key is a mistake. False: the key names a message, which may come again when its
    #: file has changed.
    key_names_file: bool = True
    tenant: str | None = None
    priority: str | None = None
    #: A duration from submission on (`24h`): OpenAI's name for the deadline.
    completion_window: str | None = None
    #: A time, or a duration from now.
    not_before: str | None = None
    #: `22:00-06:00 Europe/Berlin`.
    run_between: str | None = None
    #: False: nobody could read a report file on this machine, so none is written.
    report_file: bool = True
    #: The batch that this one retries.
    retry_of: str | None = None

    def check(self) -> None:
        """`UsageError` for a value that cannot be."""
        if self.max_tokens_default is not None and self.max_tokens_default < 1:
            raise UsageError(f"--max-tokens-default: {self.max_tokens_default} is too small, at least 1 is needed")
        if self.cache not in (None, "off", "read", "write", "on"):
            raise UsageError(f"cache: '{self.cache}' is not one of off, read, write, on")
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            raise UsageError(f"timeout: {self.timeout_s} is not a number of seconds above 0")
        if self.idempotency_key is not None and not 0 < len(self.idempotency_key) <= 512:
            raise UsageError("idempotency key: must have 1 to 512 characters")
        if self.tenant is not None and not TENANT.fullmatch(self.tenant):
            raise UsageError(f"tenant: {self.tenant[:80]!a} must be 1 to 64 letters, digits, '.', '_' or '-'")
        if self.priority is not None and self.priority not in PRIORITIES:
            raise UsageError(f"priority: '{self.priority}' is not one of {', '.join(PRIORITIES)}")
        self.times(time.time())
        for what, text in (
            ("name", self.name),
            ("idempotency key", self.idempotency_key),
            *(("metadata", part) for pair in self.metadata.items() for part in pair),
        ):
            if text is not None and not _is_unicode(text):
                raise UsageError(f"{what}: {text!a} is not Unicode text (in a shell: not UTF-8)")
        pairs, key_length, value_length = _METADATA_LIMITS
        if len(self.metadata) > pairs:
            raise UsageError(f"metadata: {len(self.metadata)} pairs, at most {pairs} are taken")
        for key, value in self.metadata.items():
            if not 0 < len(key) <= key_length or len(value) > value_length:
                raise UsageError(
                    f"metadata: '{key[:80]}': a key has 1 to {key_length} characters, a value at most {value_length}"
                )

    def times(self, now: float) -> Times:
        """When the batch may run, submitted at `now` (Unix seconds)."""
        with _named("completion window"):
            window = None if self.completion_window is None else schedule.duration(self.completion_window)
        with _named("not before"):
            not_before = None if self.not_before is None else schedule.moment(self.not_before, now)
        with _named("run between"):
            run_between = None if self.run_between is None else str(schedule.run_window(self.run_between))
        return Times(None if window is None else now + window, not_before, run_between)


class Times(NamedTuple):
    """As `Batch` has them."""

    expires_at: float | None
    not_before: float | None
    run_between: str | None


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except UsageError as exc:
        raise UsageError(f"{what}: {exc}") from None


def _is_unicode(text: str) -> bool:
    """False for halves of surrogate pairs, which is how Python reads bytes of a command line that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
