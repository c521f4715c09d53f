"""Decides who may see the live view: whoever has its token, from a page of its own. Pure.

The token comes in an `Authorization: Bearer` header (Prometheus, curl), in a cookie (the page), or, for the page alone
and once, in the address, which answers with the cookie. A browser tells by `Origin` which page asks; any other than
this one is refused, also with a token. `Host` must be a name under which the view was opened, or a page of somebody
else could reach it by a name of his own (DNS rebinding).
"""

from __future__ import annotations

import enum
import hmac
import re
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from typing import NamedTuple
from urllib.parse import parse_qs

import msgspec

HTTP = 80  # the port of an address that names none
TOKENS = re.compile(r"[\w.~+/=-]{16,}", re.ASCII)  # what goes unchanged through a header and a cookie
WILDCARDS = ("0.0.0.0", "::", "")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Reply(enum.Enum):
    """The answer to a request."""

    SERVED = 200
    LOGIN = 303  # the token was in the address: set the cookie, and send the browser to the page
    NO_TOKEN = 401
    REFUSED = 403


class Judgement(NamedTuple):
    """The decision, and the reason of a refusal."""

    reply: Reply
    why: str = ""


class Access(msgspec.Struct, frozen=True):
    """The rules of one server. `host` is what it listens on."""

    host: str
    port: int
    token: str

    def __repr__(self) -> str:
        return f"Access({self.host}:{self.port})"  # without the token

    @property
    def cookie(self) -> str:
        """The cookie's name; a browser gives those of one host to all of its ports."""
        return f"ftcomm_view_{self.port}"

    @property
    def hosts(self) -> frozenset[str] | None:
        """Returns what may stand in `Host`; None: anything, since the server listens on all addresses."""
        if self.host in WILDCARDS:
            return None
        names = {f"[{self.host}]" if ":" in self.host else self.host}
        if names & set(LOOPBACK):
            names |= set(LOOPBACK)
        ports = {f":{self.port}"} | ({""} if self.port == HTTP else set())  # a browser leaves that one out
        return frozenset(name + port for name in names for port in ports)

    def judge(self, target: str, header: Callable[[str], str]) -> Judgement:
        """Judge a GET of `target` (path and query). `header` returns the value of a
        name, or ""."""
        host, origin = header("Host"), header("Origin")
        if self.hosts is not None and host.lower() not in self.hosts:
            return Judgement(Reply.REFUSED, f"this view is not called {host[:100]!r}")
        if origin and origin.lower() != f"http://{host.lower()}":
            return Judgement(Reply.REFUSED, f"a page of {origin[:100]!r} may not look at this view")
        path, _, query = target.partition("?")
        given = self._given(header)
        if given is not None:
            return Judgement(Reply.SERVED) if self._is_token(given) else Judgement(Reply.REFUSED, "the token is wrong")
        # In a form a plus stands for a blank, which no token has.
        asked = parse_qs(query.replace("+", "%2B")).get("token") if path == "/" else None
        if asked:
            right = self._is_token(asked[0])
            return Judgement(Reply.LOGIN) if right else Judgement(Reply.REFUSED, "the token is wrong")
        return Judgement(Reply.NO_TOKEN, "this view wants its token: ftcomm dashboard prints an address that has it")

    def _given(self, header: Callable[[str], str]) -> str | None:
        kind, _, given = header("Authorization").partition(" ")
        if kind.lower() == "bearer":
            return given.strip()
        try:
            found = SimpleCookie(header("Cookie")).get(self.cookie)
        except CookieError:
            return None
        return None if found is None else found.value

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())
