"""URLs of servers and files: what they must not say to people, and whether a client will take them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

#: Stands where something was that is nobody's business.
HIDDEN: Final = "***"
#: Names in a query whose values are credentials: `password`, `X-Amz-Signature`, `sig`, `api_key`, …
_SECRET = re.compile(r"pass|pwd|secret|token|key|sig|cred|auth", re.IGNORECASE)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>`\x1b]+")
#: What ends a sentence, not a URL.
_AFTER = ":;,.)]}"


def shown(url: str) -> str:
    """A URL (a path, a chain of fsspec's) without user info and without the values of secrets in its query."""
    return "::".join(_shown(part) for part in url.split("::"))


def plain(text: str) -> str:
    """A text for people, with each URL in it as `shown`."""
    return _URL.sub(_in_text, text) if "://" in text else text


def fault(url: str, schemes: tuple[str, ...], by_kombu: bool = False) -> str | None:
    """What is wrong with the URL of a broker or a Redis, without a word of it that may be a password.

    `by_kombu`: a broker's, which kombu opens; redis-py opens all others.
    """
    scheme, colon, _ = url.partition("://")
    if not colon or scheme not in schemes:
        *most, last = (f"{s}://" for s in schemes)
        return f"must begin with {', '.join(most)} or {last}"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return (
            "host or port cannot be read; '/', '?', '#', '@' and ':' in a password are written %2F, %3F, %23, %40, %3A"
        )
    if scheme in ("redis", "rediss") and not re.fullmatch(r"/?|/\d+", parts.path):
        return "what follows host and port must be the number of a database (…:6379/0)"
    if scheme in ("unix", "redis+socket") and not parts.path:
        return f"names no socket ({scheme}:///run/redis.sock)"
    return _fault_of_query(parts.query, _options(scheme, by_kombu))


def _in_text(match: re.Match[str]) -> str:
    url = match[0].rstrip(_AFTER)
    return shown(url) + match[0][len(url) :]


def _shown(url: str) -> str:
    scheme, colon, rest = url.partition("://")
    if not colon:
        return url
    before, mark, query = rest.partition("?")
    authority, slash, path = before.partition("/")
    if "@" in authority:
        authority = f"{HIDDEN}@{authority.rpartition('@')[2]}"
    elif "@" in path and not authority.rpartition(":")[2].isdigit() and ":" in authority:
        # A password with a slash in it, not escaped.
        authority, slash, path = f"{HIDDEN}@{path.rpartition('@')[2]}", "", ""
    elif "@" in query and ":" in authority:
        # One with a question mark.
        return f"{scheme}://{HIDDEN}@{query.rpartition('@')[2]}"
    told = "&".join(_told(part) for part in query.split("&"))
    return f"{scheme}://{authority}{slash}{path}{mark}{told}"


def _told(part: str) -> str:
    name, equals, _ = part.partition("=")
    return f"{name}={HIDDEN}" if equals and _SECRET.search(unquote(name)) else part


def _number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII) is not None


def _whole(text: str) -> bool:
    return re.fullmatch(r"\d+", text, re.ASCII) is not None


def _one_of(*words: str) -> Callable[[str], bool]:
    return lambda text: text.lower() in words


_SWITCH = _one_of("true", "false")
#: Name in a query → what its value must be. Those that every client understands who may be given the URL.
_TLS: dict[str, Callable[[str], bool]] = {
    "ssl_ca_certs": bool,
    "ssl_cert_reqs": _one_of("none", "optional", "required"),
    "ssl_certfile": bool,
    "ssl_check_hostname": _SWITCH,
    "ssl_keyfile": bool,
}
_REDIS: dict[str, Callable[[str], bool]] = {
    "client_name": bool,
    "db": _whole,
    "health_check_interval": _whole,
    "max_connections": lambda text: _whole(text) and int(text) > 0,
    "password": bool,
    "protocol": _one_of("2", "3"),
    "retry_on_timeout": _SWITCH,
    "socket_connect_timeout": _number,
    "socket_keepalive": _SWITCH,
    "socket_timeout": _number,
    "username": bool,
}


def _options(scheme: str, by_kombu: bool) -> Mapping[str, Callable[[str], bool]]:
    tls = _TLS if scheme == "rediss" else {}
    if scheme == "redis+socket":
        return {"virtual_host": _whole} | ({} if by_kombu else _REDIS)
    if not by_kombu:
        return _REDIS | tls
    return {"heartbeat": _number, "login_method": bool} if scheme.endswith(("amqp", "amqps")) else tls


def _fault_of_query(query: str, options: Mapping[str, Callable[[str], bool]]) -> str | None:
    for name, value in parse_qsl(query, keep_blank_values=True):
        known = options.get(name)
        if known is None:
            # A name that looks like one is no part of a password.
            said = f" '{name}'" if re.fullmatch(r"[a-z_]{1,40}", name) else ""
            may = f"possible are {', '.join(sorted(options))}" if options else "this kind of URL has none"
            return f"behind its '?' stands something unknown{said}; {may}"
        if not known(value):
            return f"behind its '?' the value of '{name}' cannot be read"
    return None
