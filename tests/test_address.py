"""Addresses as users write them, and what of them is sent, kept and shown."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.address import bearer, read_address
from kvtune.errors import BadInput


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv("KVTUNE_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h/v1", "http://h"),
        ("https://h/llm/v1/", "https://h/llm"),
        ("https://h/llm", "https://h/llm"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://h/#top", "http://h"),
        ("HTTP://h", "http://h"),
    ],
)
def test_the_root_of_the_api_is_found(url, root):
    assert read_address(url).url == root


def test_a_name_and_password_are_sent_and_never_kept_in_the_address():
    endpoint = read_address("https://ann:p%40ss@h:8443/llm")
    assert endpoint.url == "https://h:8443/llm"
    assert endpoint.authorization == "Basic " + base64.b64encode(b"ann:p@ss").decode()
    assert "ann" not in repr(endpoint)
    assert endpoint.authorization not in repr(endpoint)


def test_a_key_comes_from_the_option_then_from_the_environment(monkeypatch):
    assert read_address("http://h").authorization is None
    monkeypatch.setenv("KVTUNE_API_KEY", "env")
    assert read_address("http://h").authorization == "Bearer env"
    assert read_address("http://h", api_key="own").authorization == "Bearer own"
    assert read_address("http://u:p@h", api_key="own").authorization.startswith("Basic ")


def test_a_key_for_another_service_is_not_sent(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert read_address("http://h").authorization is None


@pytest.mark.parametrize(
    ("metrics_url", "expected"),
    [
        ("http://h:9100/metrics", "Bearer k"),
        ("http://elsewhere/metrics", None),
        ("http://u:p@elsewhere/metrics", "Basic dTpw"),
    ],
)
def test_a_key_goes_to_metrics_on_the_same_host_only(metrics_url, expected):
    endpoint = read_address("http://h:8000", api_key="k", metrics_url=metrics_url)
    assert endpoint.metrics_authorization == expected
    assert endpoint.metrics_url == metrics_url.replace("u:p@", "")


@pytest.mark.parametrize("path", ["/metrics/", "/metrics", "/federate?match[]=a", ""])
def test_the_path_of_metrics_stays_as_it_is_written(path):
    assert read_address("http://h", metrics_url=f"http://h{path}").metrics_url == f"http://h{path}"


@pytest.mark.parametrize(
    ("url", "metrics_url", "is_sent"),
    [
        ("https://h", "https://h:9100/metrics", True),
        ("http://h", "https://h:9100/metrics", True),
        ("https://h", "http://h:9100/metrics", False),
    ],
)
def test_a_key_for_an_encrypted_server_is_never_sent_in_clear(url, metrics_url, is_sent):
    endpoint = read_address(url, api_key="k", metrics_url=metrics_url)
    assert endpoint.authorization == "Bearer k"
    assert (endpoint.metrics_authorization == "Bearer k") is is_sent


@pytest.mark.parametrize("url", ["ftp://h?key=s3cret", "http://h/?key=s3cret ü"])
def test_a_key_in_a_metrics_address_that_is_refused_is_not_shown(url):
    with pytest.raises(BadInput) as caught:
        read_address("http://h", metrics_url=url)
    assert "s3cret" not in caught.value.message + caught.value.fix


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "ftp://h", "http://", "http://h:port", "http://h:99999", "", "http://h/a b"],
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(BadInput) as caught:
        read_address(url)
    assert caught.value.fix


def test_a_query_is_refused_without_showing_it():
    with pytest.raises(BadInput) as caught:
        read_address("https://h/llm?key=s3cret")
    assert "s3cret" not in caught.value.message + caught.value.fix


def test_a_password_is_not_shown_when_the_rest_is_wrong():
    with pytest.raises(BadInput) as caught:
        read_address("http://ann:s3cret@h:port")
    assert "s3cret" not in caught.value.message + caught.value.fix


@pytest.mark.parametrize("key", ["a b", "a\n", "a\r\nHost: evil", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused(key):
    with pytest.raises(BadInput, match="API key") as caught:
        bearer(key)
    assert key not in caught.value.message


def test_certificates_must_be_a_file(tmp_path):
    with pytest.raises(BadInput, match="is no file"):
        read_address("https://h", ca_cert=str(tmp_path))


@given(
    st.one_of(st.text(max_size=40), st.text("ht:/[]@?#.1a ", max_size=12).map("http://".__add__))
)
def test_no_text_makes_it_fail_otherwise(text):
    try:
        endpoint = read_address(text)
    except BadInput:
        return
    assert endpoint.url.startswith(("http://", "https://"))
    assert all("!" <= letter <= "~" for letter in endpoint.url)
