"""Wait until the server that we started serves the model that we asked for."""

from __future__ import annotations

import contextlib
import errno
import http.client
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import JsonValue

from kvtune.address import API_KEY_VARIABLE
from kvtune.engines.vllm.arguments import normal_name
from kvtune.engines.vllm.failures import classify
from kvtune.engines.vllm.log import LogTail
from kvtune.engines.vllm.process import GuardedProcess
from kvtune.engines.vllm.secret_names import KEY_FIX, REFUSED, key_problem
from kvtune.errors import BadInput, EngineError
from kvtune.types import Failure, FailureClass

_POLL_S = 0.05
_SILENCE_S = 60.0
# Short, because a process that holds the port and never answers is to be found out soon.
_HEALTH_LIMIT_S = 2.0


def server_key(arguments: Mapping[str, JsonValue], environment: Mapping[str, str]) -> str | None:
    """The API key to send to a server that is started so: its own, else the user's for kvtune."""
    given = {normal_name(name): value for name, value in arguments.items()}.get("api-key")
    first = given[0] if isinstance(given, list) and given else given
    if isinstance(first, str) and first:
        return first
    whole = {**os.environ, **environment}
    return whole.get("VLLM_API_KEY") or whole.get(API_KEY_VARIABLE) or None


def http_get(
    host: str, port: int, path: str, timeout_s: float, key: str | None = None
) -> tuple[int, str] | None:
    """Return status and text of a GET, or `None` when the server does not answer."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def get_json(host: str, port: int, path: str, timeout_s: float) -> dict[str, Any] | None:
    """Return the JSON object at `path`, or `None` when there is none."""
    return _object(http_get(host, port, path, timeout_s))


def _object(answer: tuple[int, str] | None) -> dict[str, Any] | None:
    if answer is None or answer[0] != 200:
        return None
    with contextlib.suppress(ValueError):
        value = json.loads(answer[1])
        return value if isinstance(value, dict) else None
    return None


def free_port(host: str) -> int:
    """Return a port of `host` that nothing listens on; another process may take it at any time."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_taken(host: str, port: int) -> bool:
    """Whether something listens on the port already.

    Raises:
        BadInput: no server could listen there, whatever else does.
    """
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise BadInput(
                f"a server cannot listen on {host}, port {port}: {error.strerror}",
                "Name an address of this machine, and a port that you may use.",
            ) from error
    return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def raise_failure(failure: Failure) -> None:
    """Raise a failure as the `EngineError` of its class."""
    raise EngineError(failure.failure, failure.message, failure.fix, failure.log_excerpt)


def wait_until_ready(
    process: GuardedProcess,
    *,
    host: str,
    port: int,
    tail: LogTail,
    read_log: Callable[[], str],
    timeout_s: float,
) -> None:
    """Return once `/health` answers 200.

    Raises:
        EngineError: the server ended, or it was not ready within `timeout_s`.
    """
    start_s = time.monotonic()
    while True:
        returncode = process.poll()
        if returncode is not None:
            process.stop()  # what is left of it may still have something to log
            raise_failure(classify(read_log(), returncode=returncode, phase="start"))
        answer = http_get(host, port, "/health", _HEALTH_LIMIT_S)
        if answer is not None and answer[0] == 200:
            return
        if time.monotonic() - start_s > timeout_s:
            hang = _describe_hang(timeout_s, tail)
            raise_failure(classify(read_log(), returncode=None, phase="start", hang=hang))
        time.sleep(_POLL_S)


def _describe_hang(timeout_s: float, tail: LogTail) -> str:
    silent_s = time.monotonic() - tail.last_line_s
    state = (
        f"it has logged nothing for {silent_s:.0f} s"
        if silent_s > min(_SILENCE_S, timeout_s / 2)
        else "it was still logging"
    )
    return f"not ready after {timeout_s:.0f} s; {state}; last line: {tail.last_line[:200]!r}"


def check_listener(process: GuardedProcess, port: int) -> None:
    """Refuse a server on our port that is not ours: a measurement would be of something else.

    Raises:
        EngineError: `PORT_TAKEN`.
    """
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        guard = psutil.Process(process.guard_pid)
        for member in guard.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                for connection in member.net_connections(kind="tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                        return
        raise EngineError(
            FailureClass.PORT_TAKEN,
            f"port {port} is answered by a server that kvtune did not start",
            "Choose another port, or stop what listens there.",
        )


def check_model(host: str, port: int, expected: str, key: str | None) -> None:
    """Refuse a server that does not list the expected model.

    Raises:
        EngineError: `WRONG_MODEL`, or `REQUEST_ERRORS` when it wants another API key.
    """
    answer = http_get(host, port, "/v1/models", 30.0, key)
    if answer is not None and answer[0] in REFUSED:
        raise EngineError(
            FailureClass.REQUEST_ERRORS,
            f"the server answers with HTTP {answer[0]}: "
            + ("it does not take the API key that it was sent" if key else key_problem()),
            KEY_FIX,
        )
    listed = (_object(answer) or {}).get("data")
    entries = listed if isinstance(listed, list) else []
    names = [str(entry.get("id")) for entry in entries if isinstance(entry, dict)]
    if expected not in names:
        raise EngineError(
            FailureClass.WRONG_MODEL,
            f"the server lists {', '.join(names) or 'no model'}, not {expected!r}",
            "Check the model and --served-model-name.",
        )
