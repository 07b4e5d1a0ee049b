"""Attaching to servers of all kinds: real sockets, and nothing but GET requests."""

import json
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvtune.address import read_address
from kvtune.engines.vllm import attach as module
from kvtune.errors import BadInput, EngineError
from kvtune.types import FailureClass

MODELS = {"data": [{"id": "m", "max_model_len": 2048}]}
METRICS = 'vllm:cache_config_info{block_size="16.5",num_gpu_blocks="91"} 1.0\n'


def attach(url, **options):
    return module.attach(read_address(url, **options))


@pytest.fixture
def serve(monkeypatch):
    """Serve pages by path, and note the `Authorization` header of every request."""
    monkeypatch.delenv("KVTUNE_API_KEY", raising=False)
    servers = []

    def serve(pages, key=None):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                sent = self.headers.get("Authorization")
                server.seen.append((self.path, sent))
                page = pages.get(self.path)
                refused = key is not None and sent != f"Bearer {key}"
                self.send_response(401 if refused else 404 if page is None else 200)
                body = b"" if refused or page is None else page.encode()
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.seen = []
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_vllm_is_known_by_its_metrics_and_what_it_garbles_is_unknown(serve):
    server = serve({"/v1/models": json.dumps(MODELS), "/metrics": METRICS})
    endpoint, effective = attach(f"{server.url}/v1/")
    assert (endpoint.url, endpoint.model, endpoint.is_vllm) == (server.url, "m", True)
    assert effective.num_gpu_blocks == 91
    assert effective.block_size_tokens is None
    assert effective.max_model_len_tokens == 2048


def test_another_server_has_no_configuration(serve):
    server = serve({"/v1/models": json.dumps(MODELS)})
    endpoint, effective = attach(server.url)
    assert (endpoint.is_vllm, effective) == (False, None)


def test_the_key_is_sent_with_every_request(serve, monkeypatch):
    monkeypatch.setenv("KVTUNE_API_KEY", "s3cret")
    server = serve({"/v1/models": json.dumps(MODELS), "/metrics": METRICS}, key="s3cret")
    _, effective = attach(server.url)
    assert effective.num_gpu_blocks == 91
    assert {sent for _, sent in server.seen} == {"Bearer s3cret"}


@pytest.mark.parametrize(
    ("key", "said"), [(None, "KVTUNE_API_KEY is not set"), ("wrong", "does not take the API key")]
)
def test_a_server_that_wants_a_key_says_which_variable_holds_it(serve, monkeypatch, key, said):
    if key is not None:
        monkeypatch.setenv("KVTUNE_API_KEY", key)
    server = serve({"/v1/models": json.dumps(MODELS)}, key="s3cret")
    with pytest.raises(EngineError, match=said) as caught:
        attach(server.url)
    assert "export KVTUNE_API_KEY=" in caught.value.fix


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.6\r\n", b"", b"HTTP/1.1 200 OK\r\n\r\n{"])
def test_a_port_that_speaks_something_else_cannot_be_read(greeting):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(greeting)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(EngineError, match="cannot be read") as caught:
            attach(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    assert caught.value.failure is FailureClass.REQUEST_ERRORS


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\n\r\n{"])
def test_a_server_that_sends_byte_after_byte_is_given_up(greeting, monkeypatch):
    """No byte takes as long as a timeout of the socket, and the last one never comes."""
    monkeypatch.setattr(module, "TIMEOUT_S", 0.4)
    given_up = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(4096)
                connection.sendall(greeting)
                for _ in range(200):  # a bound for a client that never gives up
                    if given_up.wait(0.02):
                        break
                    connection.sendall(b"x")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(EngineError, match="cannot be read: timed out"):
            attach(f"http://127.0.0.1:{listener.getsockname()[1]}")
        given_up.set()
        thread.join()


def test_engines_of_the_model_that_is_served_count(serve):
    page = "".join(
        f'vllm:num_requests_running{{engine="0",model_name="{model}",pod="{model}"}} 0\n'
        f'vllm:cache_config_info{{engine="0",num_gpu_blocks="{blocks}",pod="{model}"}} 1\n'
        for model, blocks in (("other", 7), ("m", 91))
    )
    server = serve({"/v1/models": json.dumps(MODELS), "/metrics": page})
    _, effective = attach(server.url)
    assert effective.num_gpu_blocks == 91


@pytest.mark.parametrize("models", ["{}", "[]", '{"data": []}', '{"data": ["m"]}'])
def test_what_lists_no_model_is_no_openai_server(serve, models):
    with pytest.raises(EngineError) as caught:
        attach(serve({"/v1/models": models}).url)
    assert caught.value.failure is FailureClass.WRONG_MODEL


def test_an_address_without_a_scheme_is_refused():
    with pytest.raises(BadInput, match="is no address"):
        attach("localhost:8000")
