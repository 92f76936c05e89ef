"""What a gateway prints for whoever started it, once it can serve: addresses, a line to try."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

READY = "Ready: "
TRY = "Try: "

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # how to dial who listens everywhere


@dataclass(frozen=True, slots=True)
class StartupMessage:
    """A gateway that serves, as far as its first caller has to know it."""

    host: str
    http_port: int
    grpc_port: int
    model: str
    knows_chats: bool
    knows_text: bool = True
    has_tls: bool = False
    needs_keys: bool = False
    own_http_port: int | None = None

    @property
    def http_url(self) -> str:
        return self._http_url(self.http_port)

    def lines(self) -> tuple[str, str]:
        """The addresses, and a request for curl; they begin with READY and TRY."""
        grpc_url = f"grpc{self._s}://{self._address(self.grpc_port)}"
        own_url = self._http_url(self.own_http_port or self.http_port)
        addresses = f"{self.http_url} {grpc_url} dashboard {own_url}/dashboard"
        return f"{READY}{addresses}", f"{TRY}{self._curl()}"

    def _curl(self) -> str:
        content: dict[str, object] = {"prompt": "hello" if self.knows_text else [1, 2, 3]}
        if self.knows_chats:
            content = {"messages": [{"role": "user", "content": "hello"}]}
        path = "chat/completions" if self.knows_chats else "completions"
        body = json.dumps({"model": self.model, **content, "max_tokens": 32}, ensure_ascii=False)
        key = ' -H "Authorization: Bearer $BATON_API_KEY"' if self.needs_keys else ""
        return (
            f"curl {self.http_url}/v1/{path}{key} -H 'Content-Type: application/json' "
            f"-d {shlex.quote(body)}"
        )

    @property
    def _s(self) -> str:
        return "s" if self.has_tls else ""

    def _http_url(self, port: int) -> str:
        return f"http{self._s}://{self._address(port)}"

    def _address(self, port: int) -> str:
        host = _EVERYWHERE.get(self.host, self.host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
