import asyncio
import shutil
import ssl

import pytest
from contracts.fake_vllm import self_signed

from kvtune.errors import BadInput
from kvtune.profilers.load.http import HttpPool


class Page:
    """A receiver that remembers everything."""

    def __init__(self):
        self.status, self.content, self.error, self.ends, self.sends = 0, b"", None, 0, 0

    def sent(self, now_s):
        self.sends += 1

    def head(self, status):
        self.status = status

    def body(self, data, now_s):
        self.content += data

    def end(self, error, now_s):
        self.error = error
        self.ends += 1


async def fetch(pool, path="/x", body=None):
    page = Page()
    request = pool.get(path) if body is None else pool.post_json(path, body)
    await asyncio.wait_for(pool.exchange(request, page), 5)
    assert page.ends == 1
    return page


def run_on_uvloop(main):
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


loops = pytest.mark.parametrize("start", [asyncio.run, run_on_uvloop])


def exchange_all(http, handler, count=1, start=asyncio.run, **changes):
    """Fetch `count` pages one after the other; returns them and the server."""

    async def main():
        async with http.serve(handler, **changes) as server:
            pool = HttpPool.to_api(server.endpoint)
            pages = [await fetch(pool) for _ in range(count)]
            await pool.close()
            return pages, server

    return start(main())


async def chunked(exchange):
    exchange.head()
    await exchange.send(b"ab")
    await exchange.send(b"cd")
    exchange.end()


async def sized(exchange):
    exchange.head(200, "Content-Length: 4", chunked=False)
    await exchange.send(b"abcd")


async def until_close(exchange):
    exchange.head(200, chunked=False)
    await exchange.send(b"abcd")
    exchange.writer.close()


@loops
@pytest.mark.parametrize("handler", [chunked, sized, until_close])
def test_every_way_to_end_a_body_is_understood(http, handler, start):
    (page,), _ = exchange_all(http, handler, start=start)
    assert (page.status, page.content, page.error) == (200, b"abcd", None)


def test_an_interim_response_is_passed_over(http):
    async def handler(exchange):
        exchange.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await sized(exchange)

    (page,), _ = exchange_all(http, handler)
    assert (page.status, page.content, page.error) == (200, b"abcd", None)


def test_connections_are_kept_and_used_again(http):
    pages, server = exchange_all(http, chunked, count=3)
    assert [page.content for page in pages] == [b"abcd"] * 3
    assert server.connections == 1


def test_a_connection_the_server_will_close_is_not_used_again(http):
    async def handler(exchange):
        exchange.head(200, "Content-Length: 2", "Connection: close", chunked=False)
        await exchange.send(b"ok")

    pages, server = exchange_all(http, handler, count=2)
    assert [page.error for page in pages] == [None, None]
    assert server.connections == 2


def test_a_kept_connection_that_died_is_replaced_without_an_error(http):
    async def handler(exchange):
        if exchange.connection == 0 and exchange.path == "/second":
            exchange.writer.transport.abort()
        else:
            await sized(exchange)

    async def main():
        async with http.serve(handler) as server:
            pool = HttpPool(server.endpoint.url)
            await fetch(pool, "/first")
            page = await fetch(pool, "/second")
            await pool.close()
            return page, server

    page, server = asyncio.run(main())
    assert (page.error, page.content, page.sends) == (None, b"abcd", 2)
    assert server.connections == 2


def test_a_fresh_connection_that_dies_is_an_error(http):
    async def handler(exchange):
        exchange.writer.transport.abort()

    (page,), server = exchange_all(http, handler)
    assert page.error in ("connection reset", "connection closed before the response was complete")
    assert server.connections == 1


def test_a_body_cut_short_is_an_error(http):
    async def handler(exchange):
        exchange.head()
        await exchange.send(b"ab")
        exchange.writer.close()

    (page,), _ = exchange_all(http, handler)
    assert page.error == "connection closed before the response was complete"
    assert page.content == b"ab"


def test_a_server_that_does_not_speak_http_is_an_error(http):
    async def handler(exchange):
        exchange.writer.write(b"SSH-2.0-OpenSSH\r\n")

    (page,), _ = exchange_all(http, handler)
    assert page.error.startswith("malformed response: ")


def test_nobody_listening_is_connection_refused(unused_port):
    async def main():
        pool = HttpPool(f"http://127.0.0.1:{unused_port}")
        page = await fetch(pool)
        await pool.close()
        return page

    assert asyncio.run(main()).error == f"connection refused (127.0.0.1:{unused_port})"


def test_every_address_of_a_name_is_tried(http):
    async def main():
        async with http.serve(sized) as server:
            port = server.endpoint.url.rpartition(":")[2]
            pool = HttpPool(f"http://localhost:{port}")
            pool._addresses = ["127.0.0.2", "127.0.0.1"]
            page = await fetch(pool)
            await pool.close()
            return page, pool._addresses

    page, addresses = asyncio.run(main())
    assert page.error is None
    assert addresses[0] == "127.0.0.1"


def test_an_aborted_exchange_ends_with_the_given_reason(http):
    async def handler(exchange):
        await asyncio.sleep(60)

    async def main():
        async with http.serve(handler) as server:
            pool = HttpPool(server.endpoint.url)
            page = Page()
            task = asyncio.create_task(pool.exchange(pool.get("/x"), page))
            await http.until(lambda: server.exchanges)
            pool.abort(page, "timeout: too long")
            await asyncio.wait_for(task, 5)
            await pool.close()
            return page

    page = asyncio.run(main())
    assert (page.error, page.ends) == ("timeout: too long", 1)


def test_a_cancelled_exchange_closes_its_connection_at_once(http):
    async def handler(exchange):
        await exchange.client_is_gone()

    async def main():
        async with http.serve(handler) as server:
            pool = HttpPool(server.endpoint.url)
            task = asyncio.create_task(pool.exchange(pool.get("/x"), Page()))
            await http.until(lambda: server.exchanges)
            task.cancel()
            await http.until(lambda: server.lost == 1)
            await pool.close()

    asyncio.run(main())


def test_closing_ends_what_is_under_way_and_closes_every_socket(http):
    async def handler(exchange):
        await exchange.client_is_gone()

    async def main():
        async with http.serve(handler) as server:
            pool = HttpPool.to_api(server.endpoint)
            pages = [Page() for _ in range(5)]
            tasks = [asyncio.create_task(pool.exchange(pool.get("/x"), page)) for page in pages]
            await http.until(lambda: len(server.exchanges) == 5)
            await pool.close()
            await asyncio.wait_for(asyncio.gather(*tasks), 5)
            await http.until(lambda: server.lost == server.connections == 5)
            return pages

    pages = asyncio.run(main())
    assert [page.ends for page in pages] == [1] * 5
    assert all(page.error for page in pages)


@pytest.mark.parametrize("root", ["", "/", "/v1", "/v1/"])
def test_the_root_may_be_given_with_or_without_v1(http, root):
    async def main():
        async with http.serve(sized) as server:
            pool = HttpPool(server.endpoint.url + root)
            await fetch(pool, "/v1/completions", b"{}")
            await pool.close()
            return server

    (exchange,) = asyncio.run(main()).exchanges
    assert exchange.path == "/v1/completions"
    assert exchange.headers["content-type"] == "application/json"
    assert "accept-encoding" not in exchange.headers


def test_a_key_from_the_environment_is_sent_as_bearer_token(http, monkeypatch):
    _, server = exchange_all(http, sized)
    assert "authorization" not in server.exchanges[0].headers
    monkeypatch.setenv("KVTUNE_API_KEY", "s3cret")
    _, server = exchange_all(http, sized)
    assert server.exchanges[0].headers["authorization"] == "bearer s3cret"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "http://", "http://h:port", ""])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(BadInput, match="not the address of a server"):
        HttpPool(url)


@pytest.fixture
def certificate(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    return self_signed(tmp_path)


@loops
def test_https_works_with_a_trusted_certificate_only(http, certificate, monkeypatch, start):
    key, cert = certificate
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    (refused,), _ = exchange_all(http, chunked, start=start, tls=tls)
    assert refused.error.startswith("TLS failed: self-signed certificate (give the certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    pages, server = exchange_all(http, chunked, count=2, start=start, tls=tls)
    assert [page.error for page in pages] == [None, None]
    assert [page.content for page in pages] == [b"abcd"] * 2
    assert server.connections == 1
