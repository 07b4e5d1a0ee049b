"""Items become requests of their own shape, and every way to fail becomes an answer's error."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from kvtune.errors import BadInput
from kvtune.profilers.quality.server_asker import ServerAsker
from kvtune.profilers.quality.suite import Item
from kvtune.types import Endpoint, Failure, FailureClass


def completion(text, tokens=3, reason="stop"):
    return {
        "choices": [{"text": text, "finish_reason": reason}],
        "usage": {"completion_tokens": tokens},
    }


def chat(text, tokens=3):
    return {
        "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": tokens},
    }


def words(text):
    """A tokenizer in which every character is a token."""
    return [ord(character) for character in text]


def scores(token_ids, top=2):
    """Log probabilities that name their place: -1 for the second token, -2 for the third, ..."""
    entries = [None]
    for place, token_id in enumerate(token_ids[1:], start=1):
        listed = {str(9000 + n): {"logprob": -0.1, "rank": n + 1} for n in range(top)}
        entries.append(listed | {str(token_id): {"logprob": float(-place), "rank": 50}})
    return {"choices": [{"text": "", "prompt_logprobs": entries}]}


class Scripted:
    """A server that answers with what `reply(path, body)` returns: a payload, or (status, it)."""

    def __init__(self, reply):
        self.reply = reply
        self.asked = []
        self.now = self.most = 0
        self.endpoint = None

    def bodies(self, path):
        return [body for asked, body in self.asked if asked == path]

    async def connected(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                path, body = head.split()[1], json.loads(await reader.readexactly(length))
                self.asked.append((path, body))
                self.now += 1
                self.most = max(self.most, self.now)
                answer = self.reply(path, body)
                if asyncio.iscoroutine(answer):
                    answer = await answer
                await asyncio.sleep(0)
                self.now -= 1
                status, payload = answer if isinstance(answer, tuple) else (200, answer)
                data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                writer.write(
                    b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data)
                )
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(reply):
    server = Scripted(reply)
    listener = await asyncio.start_server(server.connected, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    server.endpoint = Endpoint(f"http://127.0.0.1:{port}", "m")
    try:
        yield server
    finally:
        listener.close()


def ask(reply, items, *, seed=0, concurrency=4, **options):
    async def run():
        async with serving(reply) as server:
            asker = ServerAsker(server.endpoint, **options)
            return await asker.ask(items, seed=seed, concurrency=concurrency), server

    return asyncio.run(run())


def echo(path, body):
    if path == "/v1/completions":
        return completion(f" {len(body['prompt'])}")
    return chat(f"turn {len(body['messages'])}")


def test_prompts_are_completed_and_chats_answered():
    items = [
        Item("a", "x", prompt="four", output_tokens=7),
        Item("b", "x", messages=({"role": "user", "content": "hi"},), temperature=0.5),
    ]
    (text, turn), server = ask(echo, items)
    assert (text.texts, text.output_tokens, text.finish_reasons) == ((" 4",), (3,), ("stop",))
    assert turn.texts == ("turn 1",)
    (sent,) = server.bodies("/v1/completions")
    assert (sent["prompt"], sent["max_tokens"], sent["temperature"]) == ("four", 7, 0.0)
    (sent,) = server.bodies("/v1/chat/completions")
    assert sent["messages"] == [{"role": "user", "content": "hi"}]
    assert sent["temperature"] == 0.5
    assert not {"stream", "ignore_eos", "min_tokens"} & set(sent)


def test_follow_ups_come_after_the_models_own_answers():
    items = [
        Item(
            "a",
            "x",
            messages=({"role": "system", "content": "s"}, {"role": "user", "content": "one"}),
            follow_ups=("two", "three"),
        ),
        Item("b", "x", prompt="one", follow_ups=(" two",)),
    ]
    (turns, texts), server = ask(echo, items)
    assert turns.texts == ("turn 2", "turn 4", "turn 6")
    assert [m["content"] for m in server.bodies("/v1/chat/completions")[-1]["messages"]] == [
        *("s", "one", "turn 2", "two", "turn 4", "three")
    ]
    assert texts.texts == (" 3", " 9")
    assert server.bodies("/v1/completions")[-1]["prompt"] == "one 3 two"


def test_what_takes_longest_is_asked_first():
    items = [
        Item("short", "x", prompt="short", output_tokens=8),
        Item("two turns", "x", prompt="two turns", output_tokens=20, follow_ups=("!",)),
        Item("long", "x", prompt="long", output_tokens=30),
    ]
    _, server = ask(echo, items, concurrency=1)
    asked = [body["prompt"] for body in server.bodies("/v1/completions")]
    assert asked == ["two turns", "two turns 9!", "long", "short"]


def test_answers_keep_the_order_of_items_and_the_bound_on_concurrency():
    async def slow(path, body):
        await asyncio.sleep(0.001 * (9 - int(body["prompt"])))
        return completion(body["prompt"])

    items = [Item(str(n), "x", prompt=str(n)) for n in range(9)]
    found, server = ask(slow, items, concurrency=3)
    assert [answer.texts for answer in found] == [(str(n),) for n in range(9)]
    assert server.most == 3


def test_a_seed_that_could_end_the_server_is_sent_only_where_it_cannot():
    items = [
        Item(f"{temperature}", "x", prompt="p", temperature=temperature)
        for temperature in (0.0, 1.0)
    ]
    _, safe = ask(echo, items)
    assert not any("seed" in body for body in safe.bodies("/v1/completions"))
    _, seeded = ask(echo, items, seeds=True)
    sent = {body["temperature"]: "seed" in body for body in seeded.bodies("/v1/completions")}
    assert sent == {0.0: False, 1.0: True}


def test_calls_differ_in_salt_and_items_in_seed():
    items = [Item(key, "x", prompt="p", temperature=1.0) for key in "ab"]
    _, first = ask(echo, items, seed=1, seeds=True)
    _, again = ask(echo, items, seed=1, seeds=True)
    _, other = ask(echo, items, seed=2, seeds=True)

    def sent(server, name):
        return [body[name] for body in server.bodies("/v1/completions")]

    assert len(set(sent(first, "seed"))) == 2
    assert sorted(sent(first, "seed")) == sorted(sent(again, "seed"))
    assert not set(sent(first, "seed")) & set(sent(other, "seed"))
    assert len(set(sent(first, "cache_salt"))) == 1
    assert sent(first, "cache_salt") != sent(again, "cache_salt")


def test_a_server_that_is_no_vllm_gets_no_salt():
    async def run():
        async with serving(echo) as server:
            other = Endpoint(server.endpoint.url, "m", is_vllm=False)
            await ServerAsker(other).ask([Item("a", "x", prompt="p")], seed=0, concurrency=1)
            return server.bodies("/v1/completions")[0]

    assert "cache_salt" not in asyncio.run(run())


def scoring(path, body):
    if path == "/tokenize":
        if "messages" in body:
            return {"tokens": words("<" + body["messages"][0]["content"] + ">")}
        return {"tokens": words(body["prompt"])}
    return scores(body["prompt"], body["prompt_logprobs"])


def test_only_the_tokens_of_the_scored_text_count():
    items = [
        Item("a", "x", prompt="ab", scored="cde"),
        Item("b", "x", prompt="", scored="xyz"),
        Item("c", "x", messages=({"role": "user", "content": "q"},), scored="ok"),
    ]
    (after, alone, reply), _ = ask(scoring, items)
    assert after.scores.token_ids == tuple(words("cde"))
    assert after.scores.logprobs == (-2.0, -3.0, -4.0)
    assert alone.scores.token_ids == tuple(words("yz"))
    assert alone.scores.logprobs == (-1.0, -2.0)
    assert reply.scores.token_ids == tuple(words("ok"))
    assert reply.scores.logprobs == (-3.0, -4.0)


def test_the_token_itself_is_no_likely_one_unless_it_ranks_so():
    (answer,), _ = ask(scoring, [Item("a", "x", prompt="a", scored="b")])
    assert set(answer.scores.top[0]) == {9000 + n for n in range(20)}


def test_parts_of_one_text_are_scored_in_one_request():
    items = [
        Item("a", "x", prompt="", scored="abc"),
        Item("b", "x", prompt="abc", scored="def"),
        Item("c", "x", prompt="abc", scored="dxx"),
    ]
    (first, second, other), server = ask(scoring, items)
    assert [body["prompt"] for body in server.bodies("/v1/completions")] == [
        words("abcdef"),
        words("abcdxx"),
    ]
    assert first.scores.logprobs == (-1.0, -2.0)
    assert second.scores.logprobs == other.scores.logprobs == (-3.0, -4.0, -5.0)


def test_a_server_that_allows_fewer_likely_tokens_is_asked_for_those():
    def strict(path, body):
        if body.get("prompt_logprobs", 0) > 5:
            message = "Requested prompt logprobs of 20, which is greater than max allowed: 5"
            return 400, {"error": {"message": message}}
        return scoring(path, body)

    (answer,), _ = ask(strict, [Item("a", "x", prompt="a", scored="b")])
    assert len(answer.scores.top[0]) == 5


def test_a_text_without_a_token_to_score_is_an_error():
    (answer,), _ = ask(scoring, [Item("a", "x", prompt="", scored="b")])
    assert answer.error == "the text has no token to score"


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ((400, {"error": {"message": "too long"}}), "HTTP 400: too long"),
        ((500, b"oops"), "HTTP 500: oops"),
        ((200, b"[1]"), "malformed response: [1]"),
        ((200, {"choices": []}), "it holds no choice"),
        ((200, {"choices": [{"text": "x"}]}), "how many tokens"),
    ],
)
def test_a_failure_is_an_error_of_that_item_alone(reply, says):
    def one_fails(path, body):
        return reply if body["prompt"] == "bad" else completion("fine")

    items = [Item("a", "x", prompt="bad"), Item("b", "x", prompt="good")]
    (bad, good), _ = ask(one_fails, items)
    assert says in bad.error
    assert bad.texts == ()
    assert good.texts == ("fine",)


def test_scores_that_are_missing_are_an_error():
    def without(path, body):
        return scoring(path, body) if path == "/tokenize" else completion("x")

    (answer,), _ = ask(without, [Item("a", "x", prompt="a", scored="b")])
    assert answer.error == "the server gives no log probabilities of the prompt"


def test_a_request_that_takes_too_long_is_an_error():
    async def hangs(path, body):
        await asyncio.sleep(60)

    (answer,), _ = ask(hangs, [Item("a", "x", prompt="p")], request_timeout_s=0.05)
    assert answer.error == "timeout: not complete after 0.05 s"


def test_a_dead_server_ends_everything_at_once():
    async def hangs(path, body):
        await asyncio.sleep(60)

    dead = Failure(failure=FailureClass.CRASH_UNDER_LOAD, message="the process ended", fix="")
    items = [Item(str(n), "x", prompt="p") for n in range(50)]
    looks = []

    def should_stop():
        looks.append(1)
        return dead if len(looks) > 1 else None

    found, server = ask(hangs, items, concurrency=2, should_stop=should_stop)
    assert {answer.error for answer in found} == {"stopped: the process ended"}
    assert len(server.asked) == 2


def test_where_nobody_listens_nothing_more_is_tried():
    items = [Item(str(n), "x", prompt="p") for n in range(9)]
    asker = ServerAsker(Endpoint("http://127.0.0.1:9", "m"))
    found = asyncio.run(asker.ask(items, seed=0, concurrency=2))
    assert all(answer.error.startswith("connection refused") for answer in found)


def test_an_address_that_is_none_is_refused():
    with pytest.raises(BadInput, match="not the address"):
        asyncio.run(ServerAsker(Endpoint("ftp:/x", "m")).ask([], seed=0, concurrency=1))


def test_progress_counts_answers():
    told = []
    items = [Item(str(n), "x", prompt="p") for n in range(3)]
    ask(echo, items, concurrency=1, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
