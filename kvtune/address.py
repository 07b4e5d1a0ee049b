"""How a server is reached: its address, what proves who asks, and whom to trust.

Three things that users write into an address are taken apart here, so that no secret is stored or
printed with it: a name and password in front of the host are sent as basic authorization, a closing
`/v1` is dropped, and a query is refused, because paths are added to the address.
"""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from kvtune.errors import BadInput
from kvtune.types import Endpoint

if TYPE_CHECKING:
    import ssl

API_KEY_VARIABLE = "KVTUNE_API_KEY"
"""Holds the key that kvtune sends to a server."""

_BESIDES_PRINTABLE_ASCII = re.compile(r"[^!-~]")


def read_address(
    url: str,
    *,
    api_key: str | None = None,
    ca_cert: str | None = None,
    metrics_url: str | None = None,
) -> Endpoint:
    """The server at `url`, with an empty model name.

    Without `api_key` the one in `KVTUNE_API_KEY` is sent, as a bearer token; a name and password in
    the address come before it. The metrics address gets the same authorization if it is on the
    same host and no less encrypted, else only what it carries itself.

    Raises:
        BadInput: an address cannot be used, or `ca_cert` is no file.
    """
    root, own = _taken_apart(url, "http://localhost:8000")
    if "?" in root:
        raise BadInput(
            f"{without_query(root)!r} has a query behind it, and kvtune adds paths to it",
            fix=f"leave out what comes after '?'; a key goes into {API_KEY_VARIABLE}",
        )
    authorization = own or bearer(api_key)
    if ca_cert is not None and not Path(ca_cert).expanduser().is_file():
        raise BadInput(f"{ca_cert} is no file", fix="give --ca-cert a file of PEM certificates")
    metrics_authorization = authorization
    if metrics_url is not None:
        metrics_url, own = _taken_apart(metrics_url, "http://localhost:8000/metrics")
        metrics_authorization = own or (authorization if _is_as_safe(metrics_url, root) else None)
    return Endpoint(
        url=root.rstrip("/").removesuffix("/v1"),
        model="",
        metrics_url=metrics_url,
        authorization=authorization,
        metrics_authorization=metrics_authorization,
        ca_cert=None if ca_cert is None else str(Path(ca_cert).expanduser()),
    )


def bearer(api_key: str | None = None) -> str | None:
    """The authorization with a key, else with the one in `KVTUNE_API_KEY`, else none.

    Raises:
        BadInput: the key has characters that a header cannot carry.
    """
    key = api_key or os.environ.get(API_KEY_VARIABLE)
    if not key:
        return None
    if _BESIDES_PRINTABLE_ASCII.search(key):
        raise BadInput(
            "the API key has spaces or characters that no header can carry",
            fix="look for a line break or quotes that were copied along",
        )
    return f"Bearer {key}"


def tls_context(ca_cert: str | None) -> ssl.SSLContext:
    """What this machine trusts (`SSL_CERT_FILE` is honoured), and the authorities in `ca_cert`.

    Raises:
        BadInput: `ca_cert` holds no certificate.
    """
    import ssl

    context = ssl.create_default_context()
    if ca_cert is not None:
        try:
            context.load_verify_locations(ca_cert)
        except (OSError, ssl.SSLError) as error:
            raise BadInput(
                f"{ca_cert} holds no certificate that can be read",
                fix="give --ca-cert a file of PEM certificates",
            ) from error
    return context


def tls_fix(error: ssl.SSLError) -> str:
    """What to do about a TLS handshake that failed."""
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in (62, 63, 64):  # the host, e-mail or IP address is another one
            return "use the name that the certificate was made for, in --url"
        if error.verify_code in (9, 10):  # not yet valid, expired
            return "renew the server's certificate, or set the clock of this machine"
        return (
            "give the certificate of the authority that signed it: --ca-cert FILE "
            "(or SSL_CERT_FILE)"
        )
    return "the server may not speak TLS at this port: try http://"


def without_query(url: str) -> str:
    """What may be shown of an address: its query may hold a key."""
    return url.partition("?")[0]


def _is_as_safe(url: str, other: str) -> bool:
    """Whether a secret that `other` gets may be sent to `url`: to no other host, nor in clear."""
    here, there = urlsplit(url), urlsplit(other)
    in_clear = here.scheme == "http" and there.scheme == "https"
    return here.hostname == there.hostname and not in_clear


def _taken_apart(url: str, example: str) -> tuple[str, str | None]:
    """The address without name, password and fragment; and these as an authorization."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        shown = without_query(url.rpartition("@")[2])
        raise BadInput(f"{shown!r} is no address", fix=f"write it like {example}")
    credentials, _, host = parts.netloc.rpartition("@")
    clean = parts._replace(netloc=host, fragment="").geturl()
    if _BESIDES_PRINTABLE_ASCII.search(clean):
        raise BadInput(
            f"{without_query(clean)!r} has characters that an address cannot have",
            fix="write them as %20 and the like",
        )
    if not credentials:
        return clean, None
    token = base64.b64encode(unquote(credentials).encode()).decode()
    return clean, f"Basic {token}"
