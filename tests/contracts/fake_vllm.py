"""A fake vLLM server: real sockets, pages as the releases print them, and every kind of trouble."""

import json
import socket
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EVERY_VERSION = {
    "generation_tokens": "counter",
    "num_preemptions": "counter",
    "prefix_cache_hits": "counter",
    "prefix_cache_queries": "counter",
    "prompt_tokens": "counter",
    "request_success": "counter",
    "iteration_tokens_total": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_generation_tokens": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_queue_time_seconds": "histogram",
    "time_to_first_token_seconds": "histogram",
    "kv_cache_usage_perc": "gauge",
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
}
"""What vllm/v1/metrics of 0.10.0, 0.11.0, 0.12.0, 0.14.1, 0.16.0, 0.18.0, 0.20.0, 0.24.0, 0.28.0
and 0.32.0 all name, of what kvtune reads; kinds as there."""

SINCE = {
    (0, 16): {"prompt_tokens_cached": "counter"},
    (0, 18): {
        "estimated_flops_per_gpu_total": "counter",
        "estimated_read_bytes_per_gpu_total": "counter",
        "estimated_write_bytes_per_gpu_total": "counter",
    },
    (0, 20): {"num_requests_waiting_by_reason": "gauge"},
}
OLD_NAMES = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
}
"""Printed beside the new ones by 0.10, and by 0.11 with --show-hidden-metrics."""

VERSIONS = ("0.10", "0.11", "0.12", "0.14", "0.16", "0.18", "0.20", "0.24", "0.28", "0.32")


def vllm_page(version="0.32", engines=1, values=None, labels=""):
    """The page of a release; `values` are for each engine, by name without `vllm:`.

    A histogram's value is (sum, count). `labels` are what whoever collected the page added.
    """
    release = tuple(int(part) for part in version.split("."))
    kinds = dict(EVERY_VERSION)
    for since, names in SINCE.items():
        if release >= since:
            kinds |= names
    values = values or {}
    read_as = {name: name for name in kinds}
    if release < (0, 11):
        read_as |= OLD_NAMES
    lines = []
    for name, meant in read_as.items():
        kind = kinds[meant]
        full = f"vllm:{name}"
        # The client library adds _total to counters that do not end with it.
        if kind == "counter" and not name.endswith("_total"):
            full += "_total"
        lines += [f"# HELP {full} What it counts.", f"# TYPE {full} {kind}"]
        for engine in range(engines):
            own = f'engine="{engine}",model_name="m"{labels}'
            value = values.get(meant, (0, 0) if kind == "histogram" else 0)
            if kind == "histogram":
                lines.append(f'{full}_bucket{{{own},le="+Inf"}} {float(value[1])}')
                lines.append(f"{full}_count{{{own}}} {float(value[1])}")
                lines.append(f"{full}_sum{{{own}}} {float(value[0])}")
            elif name == "request_success":
                lines.append(f'{full}{{{own},finished_reason="length"}} {float(value)}')
                lines.append(f'{full}{{{own},finished_reason="stop"}} 0.0')
            elif name == "num_requests_waiting_by_reason":
                waiting = values.get("num_requests_waiting", 0)
                lines.append(f'{full}{{{own},reason="capacity"}} {float(waiting)}')
                lines.append(f'{full}{{{own},reason="deferred"}} 0.0')
            else:
                lines.append(f"{full}{{{own}}} {float(value)}")
            if kind == "counter":
                lines.append(f"{full.removesuffix('_total')}_created{{{own}}} 1.7e+09")
    size = ',kv_cache_size_tokens="14592"' if release >= (0, 24) else ""
    lines += ["# TYPE vllm:cache_config_info gauge"]
    lines += [
        f'vllm:cache_config_info{{block_size="16",engine="{engine}",num_gpu_blocks="912"'
        f',sliding_window="None",enable_prefix_caching="True"{size}{labels}}} 1.0'
        for engine in range(engines)
    ]
    return "\n".join(lines) + "\n"


def growing(rate=100.0, start=0.0, **options):
    """A page of a server under load: what it prints at each moment; counters grow by the second."""
    began_s = time.monotonic()

    def page():
        seconds = start + (time.monotonic() - began_s)
        values = {
            "generation_tokens": 4 * rate * seconds,
            "prompt_tokens": 20 * rate * seconds,
            "prefix_cache_queries": 20 * rate * seconds,
            "request_success": rate * seconds,
            "num_preemptions": rate * seconds,
            "iteration_tokens_total": (24 * rate * seconds, rate * seconds),
            "request_decode_time_seconds": (3 * seconds, rate * seconds),
            "request_inference_time_seconds": (4 * seconds, rate * seconds),
            "request_prefill_time_seconds": (seconds, rate * seconds),
            "request_queue_time_seconds": (seconds, rate * seconds),
            "request_prompt_tokens": (20 * rate * seconds, rate * seconds),
            "request_generation_tokens": (4 * rate * seconds, rate * seconds),
            "num_requests_running": 4,
            "num_requests_waiting": 3,
            "kv_cache_usage_perc": 0.97,
        }
        return vllm_page(values=values, **options)

    return page


class FakeVllm:
    """What a test sees of the server, and what it can change while it runs.

    `metrics` is called for each page; what it raises closes the connection, and a number is an
    HTTP status. `seen` are the requests as (method, path, authorization).
    """

    def __init__(self, metrics, *, key=None, prefix="", delay_s=0.0, metrics_path="/metrics"):
        self.metrics = metrics
        self.key = key
        self.prefix = prefix
        self.delay_s = delay_s
        self.metrics_path = metrics_path
        self.seen = []
        self.url = ""
        self.stop = lambda: None

    def answer(self, path):
        """Status and text of a GET."""
        if path == self.prefix + "/v1/models":
            return 200, json.dumps({"data": [{"id": "m", "max_model_len": 2048}]})
        if path == self.prefix + "/version":
            return 200, json.dumps({"version": "0.32.0"})
        if path == self.prefix + self.metrics_path:
            time.sleep(self.delay_s)
            page = self.metrics()
            return (page, "no") if isinstance(page, int) else (200, page)
        return 404, '{"detail": "Not Found"}'


@contextmanager
def fake_vllm(metrics=vllm_page, *, certificate=None, **options):
    """Serve until the block ends; `certificate` is (key file, certificate file)."""
    fake = FakeVllm(metrics, **options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 20  # one segment: a head of its own would wait for its acknowledgement

        def _reply(self, status, text, kind="text/plain"):
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _is_refused(self):
            sent = self.headers.get("Authorization")
            fake.seen.append((self.command, self.path, sent))
            if fake.key is None or sent == f"Bearer {fake.key}":
                return False
            self._reply(401, '{"error": "Unauthorized"}')
            return True

        def do_GET(self):
            if self._is_refused():
                return
            try:
                answer = fake.answer(self.path)
            except ConnectionError:
                self.close_connection = True
                return
            self._reply(*answer)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self._is_refused():
                return
            if self.path != fake.prefix + "/v1/completions":
                self._reply(404, "no")
                return
            count = body["max_tokens"]
            events = [
                {"choices": [{"text": "x", "finish_reason": "length" if n == count - 1 else None}]}
                for n in range(count)
            ]
            events.append(
                {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": count}}
            )
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            self._reply(200, text + "data: [DONE]\n\n", "text/event-stream")

        def log_message(self, *words):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def get_request(self):
            connection, address = super().get_request()
            if certificate is not None:
                connection = tls.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            self.connections.append(connection)
            return connection, address

        def handle_error(self, request, address):
            pass  # a client that does not trust the certificate hangs up

    if certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate[1], certificate[0])
    server = Server(("127.0.0.1", 0), Handler)
    server.connections = []
    scheme = "https" if certificate is not None else "http"
    fake.url = f"{scheme}://127.0.0.1:{server.server_port}{fake.prefix}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def stop():
        """As a kill does: nobody listens, and open connections are gone."""
        server.shutdown()
        server.server_close()
        for connection in server.connections:
            hang_up(connection)

    fake.stop = stop
    try:
        yield fake
    finally:
        stop()


def hang_up(connection):
    with suppress(OSError):  # the client was faster
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def self_signed(folder):
    """A key and a certificate for 127.0.0.1 that nobody trusts, made by the openssl command."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = "openssl req -x509 -nodes -days 2 -subj /CN=127.0.0.1 -newkey ec"
    command += " -pkeyopt ec_paramgen_curve:prime256v1 -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True
    )
    return key, cert
