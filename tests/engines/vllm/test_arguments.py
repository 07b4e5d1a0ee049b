import argparse
import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.engines.vllm.arguments import folded, normal_name, parse_engine_args, to_argv
from kvtune.errors import BadInput


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"block-size": 32, "watermark": 0.05}, ["--block-size", "32", "--watermark", "0.05"]),
        ({"enable-prefix-caching": True}, ["--enable-prefix-caching"]),
        ({"enable-prefix-caching": False}, ["--no-enable-prefix-caching"]),
        ({"disable-log-stats": False, "headless": False}, []),
        ({"max-num-active-seqs": None}, []),
        ({"kv_cache_memory_bytes": "256M"}, ["--kv-cache-memory-bytes", "256M"]),
        ({"middleware": ["a", "b"]}, ["--middleware", "a", "b"]),
        ({"hf-overrides": {"a": [1]}}, ["--hf-overrides", '{"a":[1]}']),
        (
            {"attention_config.flash_attn_version": 3},
            ["--attention-config.flash_attn_version", "3"],
        ),
        ({"seed": -1}, ["--seed", "-1"]),
        ({"chat-template": "-x"}, ["--chat-template=-x"]),
    ],
)
def test_arguments_become_the_words_that_vllm_reads(arguments, words):
    assert to_argv(arguments) == words


names = st.from_regex(r"[a-z][a-z0-9]*(-[a-z0-9]+){0,3}(\.[a-z_]+)?", fullmatch=True).filter(
    lambda name: not name.startswith("no-")
)
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20).filter(
    lambda text: not text.lstrip("-")[:1].isdigit() and text[:1] not in tuple("[{.")
)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
objects = st.dictionaries(st.text(max_size=5), numbers | st.booleans() | st.none(), max_size=3)
# Later words that start with a dash are options to vLLM's parser, wherever they stand.
items = texts.filter(lambda text: not text.startswith("-"))
values = st.booleans() | texts | numbers | objects | st.lists(items, min_size=2, max_size=4)


@given(st.dictionaries(names, values, max_size=5))
def test_words_read_back_as_the_arguments_they_came_from(arguments):
    known = {"disable-log-stats", "headless", "grpc"}
    arguments = {name: value for name, value in arguments.items() if name not in known}
    assert parse_engine_args(shlex.join(to_argv(arguments))) == folded(arguments)


QUEST = "additional-config.kvtune.quest.pages"


# Seen with the parser of vLLM 0.32: it merges parts with parts, but not with a whole.
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({QUEST: 8, "x.a": "b"}, {QUEST: 8, "x.a": "b"}),
        (
            {"additional-config": {"other": {"x": 1}}, QUEST: 8},
            {"additional-config": {"other": {"x": 1}, "kvtune": {"quest": {"pages": 8}}}},
        ),
        (
            {"additional_config.kvtune.quest.pages": 8, "additional_config": {"other": 1}},
            {"additional-config": {"other": 1, "kvtune": {"quest": {"pages": 8}}}},
        ),
        ({"x.a": True, "x.b": 2, "y": 3}, {"x": {"a": True, "b": 2}, "y": 3}),
        ({"y": 1, "x.a": False, "z": 2}, {"y": 1, "x": {"a": False}, "z": 2}),
        ({"x.a": [1, 2]}, {"x": {"a": [1, 2]}}),
        ({"x.a": None, "x.b": 2}, {"x.a": None, "x.b": 2}),
        ({"x": "text", "x.a": 1}, {"x": "text", "x.a": 1}),
    ],
)
def test_parts_that_vllm_would_not_understand_are_put_together(arguments, found):
    assert list(folded(arguments).items()) == list(found.items())


@given(st.one_of(texts, numbers, objects))
def test_argparse_gets_a_single_value_whole(value):
    parser = argparse.ArgumentParser()
    parser.add_argument("--x")
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    assert parser.parse_args(to_argv({"x": value})).x == text


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("--enforce-eager --max-model-len 2048", {"enforce-eager": True, "max-model-len": 2048}),
        ("--no-enable-prefix-caching", {"enable-prefix-caching": False}),
        ("--block-size=64 --kv_cache_dtype fp8", {"block-size": 64, "kv-cache-dtype": "fp8"}),
        ("--kv-cache-memory-bytes 4G", {"kv-cache-memory-bytes": "4G"}),
        ("--attention-config.backend FLASH_ATTN", {"attention-config.backend": "FLASH_ATTN"}),
        ("""--hf-overrides '{"a": 1}'""", {"hf-overrides": {"a": 1}}),
        ("--middleware a --middleware b", {"middleware": ["a", "b"]}),
        ("--lora-modules a=1 b=2", {"lora-modules": ["a=1", "b=2"]}),
        ("--chat-template '{{ messages }}'", {"chat-template": "{{ messages }}"}),
        ("--seed -1", {"seed": -1}),
        ("", {}),
    ],
)
def test_a_users_words_are_read_as_they_are_meant(text, arguments):
    assert parse_engine_args(text) == arguments


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2048 --enforce-eager", "'2048', which is not an option"),
        ("--enforce-eager -tp 2", "short option '-tp'"),
        ("--chat-template 'x", "cannot be read"),
    ],
)
def test_words_that_belong_to_no_option_are_refused(text, said):
    with pytest.raises(BadInput, match="engine arguments") as caught:
        parse_engine_args(text)
    assert said in caught.value.message
    assert caught.value.fix


def test_names_are_spelled_as_vllm_spells_them():
    assert normal_name("--kv_cache_dtype") == "kv-cache-dtype"
    assert normal_name("attention_config.tq_max_kv_splits") == "attention-config.tq_max_kv_splits"
