import pytest

from kvtune.autotune.emit.secret_names import is_secret, secret_variable


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "VLLM_API_KEY",
        "OPENAI_APIKEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "DB_PASSWORD",
        "password",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "MY_SECRETS",
        "TOKEN_2",
        "KEY2",
    ],
)
def test_names_of_secrets_are_known(name):
    assert is_secret(name, "12345")


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "KEYBOARD", "OMP_WAIT_POLICY", "VLLM_CPU_KVCACHE_SPACE", "HF_HOME"],
)
def test_other_names_stay_plain(name):
    assert not is_secret(name, "abc")


def test_limit_in_tokens_is_no_secret_but_a_token_there_is():
    assert not is_secret("VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", "4096")
    assert not is_secret("VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD", "1024")
    assert is_secret("API_TOKENS", "abc,def")


def test_secret_options_have_a_variable():
    assert secret_variable("api-key", "sk-1") == "VLLM_API_KEY"
    assert secret_variable("api_key", ["sk-1", "sk-2"]) == "VLLM_API_KEY"
    assert secret_variable("hf-token", "hf_1") == "HF_TOKEN"


def test_stored_login_is_no_secret():
    assert secret_variable("hf-token", True) is None
    assert secret_variable("max-num-batched-tokens", 2048) is None
