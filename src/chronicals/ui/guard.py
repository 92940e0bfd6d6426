"""Guard of the page: who may ask, from where, and what an answer may do in a browser."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY_BYTES = 24
"""Random bytes of a key: 192 bits."""

ANY_ADDRESS = ("0.0.0.0", "::")
LOOPBACK = ("127.0.0.1", "localhost", "::1")

POLICY = "; ".join(
    (
        "default-src 'self'",
        # Vue compiles the templates of its components in the browser, and NiceGUI's page has an
        # inline script with its elements.
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'self'",
    )
)
"""Content security policy: no request leaves the server of the page."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of each answer that has none of this name."""


def lasting_key(file: Path) -> str:
    """Return the key of a place, made at its first use and readable by its owner alone.

    It is the same after a restart, so that a page which is open stays let in.
    """
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(secrets.token_urlsafe(KEY_BYTES))
    return file.read_text().strip()


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine alone."""
    return host in LOOPBACK


@dataclass(frozen=True)
class Guard:
    """ASGI application before the page.

    A request must name a host of this server (a foreign name that resolves to 127.0.0.1 is
    refused), come from no other origin, and bring the cookie that the key is exchanged for.

    Attributes:
        page: the application behind.
        key: of the link that is printed.
        host: that the server listens at.
        port: likewise.
    """

    page: Application
    key: str
    host: str
    port: int

    @property
    def cookie(self) -> str:
        """Name of the cookie: servers at other ports keep theirs."""
        return f"chronicals-{self.port}"

    @property
    def token(self) -> str:
        """Value of the cookie, from which the key cannot be computed."""
        return hmac.new(self.key.encode(), b"cookie", hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that is allowed; answer others with 303, 401 or 403."""
        if scope["type"] not in ("http", "websocket"):
            await self.page(scope, receive, send)
            return
        headers = {
            name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        if not self.is_own_host(headers.get("host", "")):
            await _refuse(scope, send, 403, "This host name is not the page's.")
        elif not self._is_own_origin(headers):
            await _refuse(scope, send, 403, "The request comes from another page.")
        elif self._has_cookie(headers.get("cookie", "")):
            await self.page(scope, receive, _with_headers(send))
        elif scope["type"] == "http" and self._has_key(scope):
            await self._let_in(scope, send)
        else:
            await _refuse(scope, send, 401, "Open the link that 'chronicals ui' printed.")

    def is_own_host(self, host: str) -> bool:
        """Return whether a Host header names this server.

        Where it listens at all addresses, any address will do, but no name: only names can be
        bound to another address after they were looked up.
        """
        parts = urlsplit(f"//{host}")
        try:
            name, port = parts.hostname or "", parts.port
        except ValueError:
            return False
        if port != self.port:
            return False
        if name == self.host or (name in LOOPBACK and self.host in (*LOOPBACK, *ANY_ADDRESS)):
            return True
        if self.host not in ANY_ADDRESS:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_own_origin(self, headers: dict[str, str]) -> bool:
        origin = headers.get("origin")
        return origin is None or origin == f"http://{headers['host']}"

    def _has_cookie(self, text: str) -> bool:
        try:
            found = SimpleCookie(text).get(self.cookie)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self.token.encode())

    def _has_key(self, scope: Scope) -> bool:
        given = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0]
        return hmac.compare_digest(given.encode(), self.key.encode())

    async def _let_in(self, scope: Scope, send: Send) -> None:
        """Exchange the key for the cookie, and lead to the same address without the key."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        del query["key"]
        rest = urlencode(query, doseq=True)
        # Of two slashes the browser would make the address of another host.
        address = "/" + scope["path"].lstrip("/\\") + (f"?{rest}" if rest else "")
        headers = {
            "location": address,
            "set-cookie": f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/",
            "cache-control": "no-store",
        }
        await _answer(send, 303, headers, "")


async def _refuse(scope: Scope, send: Send, status: int, text: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": text})
        return
    await _answer(send, status, {"content-type": "text/plain; charset=utf-8"}, f"{text}\n")


async def _answer(send: Send, status: int, headers: dict[str, str], text: str) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in {**HEADERS, **headers}.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": text.encode()})


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            added = [
                (name.encode(), value.encode())
                for name, value in HEADERS.items()
                if name.encode() not in present
            ]
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return sending
