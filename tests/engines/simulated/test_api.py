"""What the simulated server answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from raw_client import (
    CHAT,
    COMPLETIONS,
    ask,
    ask_json,
    completion,
    events,
    streamed,
)

from kvtune.engines.base import RunningServer


def test_it_describes_itself_as_vllm_does(server: RunningServer) -> None:
    assert ask(server, "GET", "/health")[0] == 200
    (card,) = ask_json(server, "/v1/models")["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 2048)
    config = ask_json(server, "/server_info?config_format=json")["vllm_config"]
    assert config["cache_config"]["kv_cache_size_tokens"] == 2816
    assert config["scheduler_config"]["max_num_seqs"] == 128
    assert isinstance(ask_json(server, "/server_info")["vllm_config"], str)
    assert ask_json(server, "/version")["version"] == server.effective.engine_version
    info = re.search(r"vllm:cache_config_info{(.*)} 1", ask(server, "GET", "/metrics")[2].decode())
    assert info is not None
    assert {'num_gpu_blocks="22"', 'block_size="128"'} <= set(info[1].split(","))


def test_what_runs_is_read_back(server: RunningServer) -> None:
    effective = server.effective
    assert effective.kv_cache_size_tokens == 2816
    assert effective.block_size_tokens == 128
    assert effective.kv_cache_memory_bytes == 64 << 20
    assert effective.max_model_len_tokens == 2048
    assert effective.max_num_batched_tokens == 2048
    assert effective.enable_prefix_caching is True
    assert effective.model_dtype == "bfloat16"


def test_text_is_tokenized_four_bytes_at_a_time(server: RunningServer) -> None:
    assert ask_json(server, "/tokenize", {"prompt": "abcdefghij"})["count"] == 3


# --- answers ---


def test_a_stream_has_one_message_a_token_then_usage_then_the_end(server: RunningServer) -> None:
    status, headers, raw = ask(server, "POST", COMPLETIONS, streamed("one two three", 7))
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    *tokens, usage = events(raw)
    assert len(tokens) == 7
    assert all(token["choices"][0]["text"] for token in tokens)
    reasons = [token["choices"][0]["finish_reason"] for token in tokens]
    assert reasons == [None] * 6 + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 4
    assert usage["usage"]["completion_tokens"] == 7
    assert usage["usage"]["total_tokens"] == 11


def test_usage_comes_only_when_it_is_asked_for(server: RunningServer) -> None:
    _, _, raw = ask(server, "POST", COMPLETIONS, completion("hello", 3, stream=True))
    assert [len(event["choices"]) for event in events(raw)] == [1, 1, 1]


def test_a_chat_stream_announces_its_role_first(server: RunningServer) -> None:
    body = streamed(None, 4) | {"messages": [{"role": "user", "content": "hi there"}]}
    del body["prompt"]
    role, *tokens, usage = events(ask(server, "POST", CHAT, body)[2])
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(tokens) == 4
    assert all(token["choices"][0]["delta"]["content"] for token in tokens)
    assert usage["usage"]["completion_tokens"] == 4


def test_a_whole_answer_says_what_the_stream_says(server: RunningServer) -> None:
    whole = ask_json(server, COMPLETIONS, completion("same words", 6))
    parts = events(ask(server, "POST", COMPLETIONS, streamed("same words", 6))[2])[:-1]
    assert whole["choices"][0]["text"] == "".join(part["choices"][0]["text"] for part in parts)
    assert whole["usage"]["completion_tokens"] == 6
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    answer = ask_json(server, CHAT, body)["choices"][0]["message"]
    assert answer["role"] == "assistant"
    assert len(answer["content"].split()) == 3


def test_answers_depend_on_the_prompt_alone(server: RunningServer) -> None:
    def text(prompt: Any) -> str:
        answer: str = ask_json(server, COMPLETIONS, completion(prompt, 8))["choices"][0]["text"]
        return answer

    assert text([5, 6, 7]) == text([5, 6, 7]) != text([5, 6, 8])


def test_it_finds_a_fact_that_stands_in_the_prompt(server: RunningServer) -> None:
    fact = "The code of the safe is 5823, they say."
    prompt = f"{fact} And so on. Question: what is the code? Answer: The code of the safe is"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20}
    choice = ask_json(server, COMPLETIONS, body)["choices"][0]
    assert choice["text"] == " 5823, they say."
    assert choice["finish_reason"] == "stop"


def test_an_answer_ends_by_itself_unless_it_is_forced_on(server: RunningServer) -> None:
    body = {"model": "tiny", "prompt": "words of no meaning", "max_tokens": 1000}
    natural = ask_json(server, COMPLETIONS, body)
    tokens = natural["usage"]["completion_tokens"]
    assert 16 <= tokens < 1000
    assert natural["choices"][0]["finish_reason"] == "stop"
    least = ask_json(server, COMPLETIONS, body | {"min_tokens": tokens + 9})
    assert least["usage"]["completion_tokens"] == tokens + 9


def test_a_repeated_prompt_is_served_from_the_cache_unless_salt_or_reset_forbid(
    server: RunningServer,
) -> None:
    def cached(**more: Any) -> int:
        body = completion(list(range(300, 700)), 2, **more)
        tokens: int = ask_json(server, COMPLETIONS, body)["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        return tokens

    assert ask_json(server, "/reset_prefix_cache", {})["success"] is True
    assert [cached(), cached()] == [0, 384]
    assert cached(cache_salt="other") == 0
    assert ask_json(server, "/reset_prefix_cache", {})["success"] is True
    assert cached() == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (COMPLETIONS, b"{", 400, "JSON decode error"),
        (COMPLETIONS, b"[]", 400, "must be a JSON object"),
        (COMPLETIONS, {"model": "tiny"}, 400, "prompt"),
        (COMPLETIONS, completion(""), 400, "prompt"),
        (COMPLETIONS, completion([]), 400, "prompt"),
        (COMPLETIONS, completion(["a", "b"]), 400, "prompt"),
        (COMPLETIONS, completion([1, "b"]), 400, "prompt"),
        (COMPLETIONS, completion([1, 49_152]), 400, "out of vocabulary"),
        (COMPLETIONS, completion(list(range(2045)), 4), 400, "maximum context length is 2048"),
        (COMPLETIONS, completion("a", 0), 400, "max_tokens must be at least 1"),
        (COMPLETIONS, completion("a", 5, min_tokens=6), 400, "min_tokens must be less"),
        (COMPLETIONS, completion("a", 5, n=2), 400, "one answer"),
        (COMPLETIONS, completion("a", stream_options={}), 400, "stream=True"),
        (COMPLETIONS, completion("a") | {"model": "huge"}, 404, "`huge` does not exist"),
        (CHAT, {"model": "tiny", "messages": []}, 400, "messages"),
        (CHAT, {"model": "tiny", "messages": [{"role": "user"}]}, 400, "content"),
        (CHAT, {"model": "tiny", "messages": [3]}, 400, "content"),
    ],
)
def test_bad_requests_get_an_error_in_vllms_form(
    server: RunningServer, path: str, body: Any, status: int, says: str
) -> None:
    got, _, raw = ask(server, "POST", path, body)
    error = json.loads(raw)["error"]
    assert (got, error["code"]) == (status, status)
    assert says in error["message"]
    assert error["type"] == {400: "BadRequestError", 404: "NotFoundError"}[status]


def test_the_longest_request_that_fits_is_served(server: RunningServer) -> None:
    answer = ask_json(server, COMPLETIONS, completion(list(range(2045)), 3))
    assert answer["usage"]["total_tokens"] == 2048


def test_unknown_paths_and_methods_are_told_apart(server: RunningServer) -> None:
    assert ask(server, "GET", "/nowhere")[0] == 404
    assert ask(server, "GET", COMPLETIONS)[0] == 405
