"""A small HTTP/1.1 client that takes its time stamps the moment bytes arrive.

Bytes go from the socket through the parser to a `Receiver` inside one callback of the event loop:
no task wakes up before an answer is complete. Connections are kept alive and reused.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from kvtune.address import bearer, tls_context, tls_fix
from kvtune.errors import BadInput
from kvtune.types import Endpoint

_READ_BYTES = 256 * 1024
_CLOSE_TIMEOUT_S = 2.0


class Receiver(Protocol):
    """What an answer is handed to. `end` is called once, last; `now_s` is `time.perf_counter`."""

    def sent(self, now_s: float) -> None:
        """Take note that the request is being written (again, if it had to be sent anew)."""

    def head(self, status: int) -> None:
        """Take the status of the response."""

    def body(self, data: bytes, now_s: float) -> None:
        """Take the next bytes of the response body."""

    def end(self, error: str | None, now_s: float) -> None:
        """Take note that the response is complete (`error` is None) or why it is not."""


class Connection(asyncio.BufferedProtocol):
    """One connection; carries one exchange at a time."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[bool] | None = None
        self._now_s = 0.0
        self._status = 0
        self._length_known = False
        self._in_body = False
        self._heard = False
        self._reused = False
        self.reusable = False

    async def exchange(self, request: bytes, receiver: Receiver) -> bool:
        """Send `request` and wait until `receiver` has its end.

        Returns False, without an end, when the server had closed a kept connection unused: the
        request was not looked at and can be sent again.
        """
        if self._transport is None or self._transport.is_closing():
            self.reusable = False  # its loss has not been told yet
            return False
        self._done = asyncio.get_running_loop().create_future()
        self._receiver = receiver
        self._heard = self._in_body = self._length_known = False
        self.reusable = False
        receiver.sent(time.perf_counter())
        self._transport.write(request)
        try:
            return await self._done
        finally:
            self._reused = True
            if not self.reusable:
                self.abort()

    def serves(self, receiver: Receiver) -> bool:
        """Whether the exchange under way is that of `receiver`."""
        return self._receiver is receiver

    def abort(self, error: str = "aborted") -> None:
        """Close the connection now; an exchange under way ends with `error`."""
        self.reusable = False
        self._finish(error)
        if self._transport is not None:
            self._transport.abort()

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._pool.remember(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Lend the buffer all connections share: it is read out before the next one is filled."""
        return self._pool.view

    def buffer_updated(self, nbytes: int) -> None:
        """Take the time, then let the parser hand the bytes on."""
        self._now_s = self._pool.last_bytes_s = time.perf_counter()
        if self._receiver is None:
            self.abort()
            return
        self._heard = True
        try:
            self._parser.feed_data(self._pool.view[:nbytes])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abort(f"malformed response: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange that was under way; a body without a length ends like this."""
        self._pool.forget(self)
        self.reusable = False
        if self._done is None or self._done.done():
            return
        if self._in_body and not self._length_known and exc is None:
            self._finish(None)
        elif self._reused and not self._heard:
            self._receiver = None
            self._done.set_result(False)
        elif exc is not None:
            self._finish(describe_error(exc))
        else:
            self._finish("connection closed before the response was complete")

    # the parser calls these

    def on_header(self, name: bytes, value: bytes) -> None:
        """See whether the body says where it ends."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._length_known = True

    def on_headers_complete(self) -> None:
        """Pass the status on."""
        self._status = self._parser.get_status_code()
        self._in_body = self._status >= 200
        if self._in_body and self._receiver is not None:
            self._receiver.head(self._status)

    def on_body(self, body: bytes) -> None:
        """Pass body bytes on."""
        if self._receiver is not None:
            self._receiver.body(body, self._now_s)

    def on_message_complete(self) -> None:
        """End the exchange; interim responses (1xx) do not."""
        if self._status >= 200:
            self.reusable = self._parser.should_keep_alive()
            self._finish(None)

    def _finish(self, error: str | None) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.end(error, time.perf_counter())
        if self._done is not None and not self._done.done():
            self._done.set_result(True)


class HttpPool:
    """Connections to one server.

    `url` is the root of the API (a closing `/v1` is tolerated). `authorization` is the header of
    that name. `ca_cert` is a file of certificates that are trusted too.

    Raises:
        BadInput: `url` is not an http or https address, or `ca_cert` holds no certificate.
    """

    def __init__(
        self,
        url: str,
        *,
        authorization: str | None = None,
        ca_cert: str | None = None,
        connect_timeout_s: float = 30.0,
    ) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise BadInput(
                f"{url!r} is not the address of a server",
                fix="give it as http://host:port or https://host:port",
            )
        self.view = memoryview(bytearray(_READ_BYTES))
        self.last_bytes_s = 0.0
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = tls_context(ca_cert) if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\n"
        if authorization is not None:
            self._headers += f"Authorization: {authorization}\r\n"
        self._connect_timeout_s = connect_timeout_s
        self._addresses: list[str] = []
        self._open: set[Connection] = set()
        self._idle: list[Connection] = []
        self._all_lost = asyncio.Event()

    @classmethod
    def to_api(cls, endpoint: Endpoint) -> HttpPool:
        """Connections to the API of a server; a key in the environment is sent if none is named."""
        return cls(
            endpoint.url,
            authorization=endpoint.authorization or bearer(),
            ca_cert=endpoint.ca_cert,
        )

    @classmethod
    def to_metrics(cls, endpoint: Endpoint, *, connect_timeout_s: float) -> tuple[HttpPool, str]:
        """Connections to where a server's metrics are, and their path there."""
        if endpoint.metrics_url is None:
            url, path = endpoint.url, "/metrics"
            authorization = endpoint.authorization or bearer()
        else:
            parts = urlsplit(endpoint.metrics_url)
            url = f"{parts.scheme}://{parts.netloc}"
            path = parts._replace(scheme="", netloc="").geturl() or "/"
            authorization = endpoint.metrics_authorization
        pool = cls(
            url,
            authorization=authorization,
            ca_cert=endpoint.ca_cert,
            connect_timeout_s=connect_timeout_s,
        )
        return pool, path

    def get(self, path: str) -> bytes:
        """Return the bytes of a GET request."""
        return f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()

    def post_json(self, path: str, body: bytes) -> bytes:
        """Return the bytes of a POST request with a JSON body."""
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Send `request` and wait until `receiver` has its end; a failure is an end, not raised."""
        while self._idle:
            if await self._exchange_on(self._idle.pop(), request, receiver):
                return
        try:
            connection = await self._connect()
        except (OSError, TimeoutError) as error:
            receiver.end(self._describe(error), time.perf_counter())
            return
        if not await self._exchange_on(connection, request, receiver):
            receiver.end("connection closed before the request was sent", time.perf_counter())

    def abort(self, receiver: Receiver, error: str) -> None:
        """End the exchange of `receiver` with `error`; nothing happens if it is not under way."""
        for connection in self._open:
            if connection.serves(receiver):
                connection.abort(error)
                return

    def remember(self, connection: Connection) -> None:
        """Count a connection that is open."""
        self._open.add(connection)

    def forget(self, connection: Connection) -> None:
        """Drop a connection that is gone."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if not self._open:
            self._all_lost.set()

    async def close(self) -> None:
        """Close all connections; exchanges under way end with an error."""
        self._idle.clear()
        self._all_lost.clear()
        for connection in list(self._open):
            connection.abort()
        if self._open:
            try:
                await asyncio.wait_for(self._all_lost.wait(), _CLOSE_TIMEOUT_S)
            except TimeoutError:
                self._open.clear()

    async def _exchange_on(
        self, connection: Connection, request: bytes, receiver: Receiver
    ) -> bool:
        looked_at = await connection.exchange(request, receiver)
        if connection.reusable:
            self._idle.append(connection)
        return looked_at

    async def _connect(self) -> Connection:
        """Open a connection to the first address of the host that takes one."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout_s):
            if not self._addresses:
                found = await loop.getaddrinfo(self._host, self._port, type=1)
                self._addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
            refused: OSError | None = None
            for address in tuple(self._addresses):
                try:
                    _, connection = await loop.create_connection(
                        lambda: Connection(self),
                        address,
                        self._port,
                        ssl=self._tls,
                        server_hostname=self._host if self._tls else None,
                    )
                except OSError as error:
                    refused = error
                    continue
                self._addresses.remove(address)
                self._addresses.insert(0, address)
                return connection
        raise refused or OSError(f"{self._host} has no address")

    def _describe(self, error: Exception) -> str:
        where = f"{self._host}:{self._port}"
        if isinstance(error, TimeoutError):
            return f"timeout: no connection to {where} within {self._connect_timeout_s:g} s"
        return f"{describe_error(error)} ({where})"


def describe_error(error: Exception) -> str:
    """Return the short name kvtune gives a failure of the network."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "connection reset"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {_tls_reason(error)} ({tls_fix(error)})"
    return f"connection failed: {error}"


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message.rstrip(".")
    return error.reason or str(error)
