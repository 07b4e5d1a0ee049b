"""Look at a server that somebody else runs. Only reads; never sends it work, never signals it."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from kvtune.address import tls_context, tls_fix, without_query
from kvtune.engines.vllm.effective import read_effective
from kvtune.engines.vllm.secret_names import KEY_FIX, REFUSED, key_problem
from kvtune.errors import EngineError
from kvtune.types import EffectiveConfig, Endpoint, FailureClass

TIMEOUT_S = 10.0
"""For a connection, and then for a whole page: also a server that sends byte after byte has no
longer."""

PAGE_LIMIT_BYTES = 64 * 1024 * 1024
_UNREADABLE = (OSError, ValueError, http.client.HTTPException)
_REDIRECTS = (301, 302, 303, 307, 308)


def attach(endpoint: Endpoint) -> tuple[Endpoint, EffectiveConfig | None]:
    """Find out what serves at an address (see `read_address`), and under which name.

    The configuration is None when it is no vLLM server.

    Raises:
        BadInput: the file of certificates cannot be used.
        EngineError: nothing answers there, or it is no OpenAI-compatible server, or a metrics
            address that the user gave cannot be read.
    """
    reader = _Reader(endpoint)
    base = endpoint.url
    models = reader.json(f"{base}/v1/models")
    listed = models.get("data") if isinstance(models, dict) else None
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict):
        raise EngineError(
            FailureClass.WRONG_MODEL,
            f"{base}/v1/models lists no model, so this is no OpenAI-compatible server",
            fix="give the address of the server's API, without /v1",
        )
    entry = listed[0]
    metrics = reader.metrics()
    is_vllm = "vllm:" in metrics
    endpoint = replace(endpoint, model=str(entry.get("id")), is_vllm=is_vllm)
    if not is_vllm:
        return endpoint, None
    version = reader.optional_json(f"{base}/version").get("version")
    effective = read_effective(
        server_info=reader.optional_json(f"{base}/server_info?config_format=json"),
        metrics_text=metrics,
        log_text="",
        version=version,
        start_kind="attached",
        model=endpoint.model,
    )
    if effective.max_model_len_tokens is None and isinstance(entry.get("max_model_len"), int):
        effective = effective.model_copy(update={"max_model_len_tokens": entry["max_model_len"]})
    return endpoint, effective


class _Reader:
    """Reads pages of a server as the load client would: directly, without a proxy.

    It follows no redirect either: a key is for this server only.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._tls: ssl.SSLContext | None = None
        if "https" in (urlsplit(endpoint.url).scheme, urlsplit(endpoint.metrics_url or "").scheme):
            self._tls = tls_context(endpoint.ca_cert)

    def json(self, url: str) -> Any:
        """The content of a page.

        Raises:
            EngineError: it cannot be read.
        """
        return json.loads(self._text(url, self._endpoint.authorization, is_json=True))

    def optional_json(self, url: str) -> dict[str, Any]:
        """The content of a page that not every server has."""
        try:
            found = self.json(url)
        except EngineError:
            return {}
        return found if isinstance(found, dict) else {}

    def metrics(self) -> str:
        """The page of metrics; empty if the server has none where vLLM has it.

        Raises:
            EngineError: the user said where it is, and it is not there.
        """
        endpoint = self._endpoint
        if endpoint.metrics_url is not None:
            return self._text(endpoint.metrics_url, endpoint.metrics_authorization)
        try:
            return self._text(f"{endpoint.url}/metrics", endpoint.authorization)
        except EngineError:
            return ""

    def _text(self, url: str, authorization: str | None, *, is_json: bool = False) -> str:
        try:
            text = self._read(url, authorization).decode("utf-8", "replace")
            if is_json:
                json.loads(text)
        except _UNREADABLE as error:
            reason: Exception | str = error
            fix = "check the address, and that the server is up"
            if isinstance(error, ssl.SSLError):
                fix = tls_fix(error)
            elif isinstance(error, json.JSONDecodeError):
                reason = f"it is no JSON but begins with {text[:40]!r}"
                fix = "give the address of the server's API, without /v1"
            raise EngineError(
                FailureClass.REQUEST_ERRORS, f"{without_query(url)} cannot be read: {reason}", fix
            ) from error
        return text

    def _read(self, url: str, authorization: str | None) -> bytes:
        parts = urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"Accept": "*/*", "User-Agent": "kvtune"}
        if authorization is not None:
            headers["Authorization"] = authorization
        with closing(self._connection(url)) as connection:
            connection.connect()
            with _at_most(TIMEOUT_S, connection.sock):
                connection.request("GET", path, headers=headers)
                with closing(connection.getresponse()) as answer:
                    if not 200 <= answer.status < 300:
                        raise _refused(url, answer, is_key_sent=authorization is not None)
                    return answer.read(PAGE_LIMIT_BYTES)

    def _connection(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme == "https":
            return http.client.HTTPSConnection(
                host, parts.port, timeout=TIMEOUT_S, context=self._tls
            )
        return http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT_S)


@contextmanager
def _at_most(limit_s: float, connected: socket.socket) -> Iterator[None]:
    """Hang up when the time is over: the timeout of a socket begins anew with every byte.

    Raises:
        TimeoutError: it was.
    """
    is_over = threading.Event()

    def hang_up() -> None:
        is_over.set()
        with suppress(OSError):  # the server was faster
            socket.socket.shutdown(connected, socket.SHUT_RDWR)

    timer = threading.Timer(limit_s, hang_up)
    timer.start()
    try:
        yield
    except _UNREADABLE as error:
        if is_over.is_set():
            raise TimeoutError("timed out") from error
        raise
    finally:
        timer.cancel()
        timer.join()
    if is_over.is_set():
        raise TimeoutError("timed out")


def _refused(url: str, answer: http.client.HTTPResponse, *, is_key_sent: bool) -> EngineError:
    said = f"{without_query(url)} answers with HTTP {answer.status}"
    fix = "give the address of the server's API, without /v1"
    if answer.status in REFUSED:
        why = "it does not take the API key that it was sent" if is_key_sent else key_problem()
        # Never sent unasked: that key opens an account, and an address may be anybody's.
        said, fix = f"{said}: {why}", KEY_FIX
        if not is_key_sent and "OPENAI_API_KEY" in os.environ:
            fix = 'if it is the key in OPENAI_API_KEY: --api-key "$OPENAI_API_KEY"'
    elif answer.status in _REDIRECTS and (target := answer.headers.get("Location")):
        said, fix = f"{said} and points to {without_query(target)}", "give that address instead"
    return EngineError(FailureClass.REQUEST_ERRORS, said, fix)
