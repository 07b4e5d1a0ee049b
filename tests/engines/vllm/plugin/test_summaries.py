import dataclasses
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.engines.vllm.plugin.summaries import Summaries, writes_of

HEADS, WIDTH = 2, 3
CPU = torch.device("cpu")


def summaries(pages=8, dtype=torch.float32):
    return Summaries(pages, HEADS, WIDTH, dtype, CPU)


class Cache:
    """A paged cache in which each page is a list of the keys that its owner wrote."""

    def __init__(self, pages, page_tokens):
        self.page_tokens = page_tokens
        self.free = list(range(pages))
        self.keys = {}
        self.requests = []

    def start(self, random):
        """A request, which may begin with the full pages of another."""
        shared = []
        if self.requests and random.random() < 0.5:
            other, length = random.choice(self.requests)
            shared = other[: random.randint(0, length // self.page_tokens)]
        self.requests.append([list(shared), len(shared) * self.page_tokens])

    def end(self, request):
        self.requests.remove(request)
        held = {page for pages, _ in self.requests for page in pages}
        for page in request[0]:
            if page not in held:
                self.free.append(page)
                del self.keys[page]

    def write(self, request, keys):
        """The slots of a request's next tokens; fewer if there is no room."""
        slots = []
        for key in keys:
            pages, length = request
            if length == len(pages) * self.page_tokens:
                if not self.free:
                    break
                pages.append(self.free.pop(0))
                self.keys[pages[-1]] = []
            slots.append(pages[-1] * self.page_tokens + length % self.page_tokens)
            self.keys[pages[-1]].append(key)
            request[1] += 1
        return slots


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 12))
def test_bounds_are_those_of_the_keys_of_each_page(random: Random, page_tokens, steps):
    cache, ours = Cache(8, page_tokens), summaries()
    for _ in range(steps):
        if cache.requests and random.random() < 0.3:
            cache.end(random.choice(cache.requests))
        if len(cache.requests) < 3:
            cache.start(random)
        tokens = []
        for request in cache.requests:
            count = random.choice((1, random.randint(0, 3 * page_tokens)))
            keys = [
                [[random.randint(-9, 9) for _ in range(WIDTH)] for _ in range(HEADS)]
                for _ in range(count)
            ]
            tokens += zip(cache.write(request, keys), keys, strict=False)
        tokens += [(-1, [[99] * WIDTH] * HEADS)] * random.randint(0, 2)
        random.shuffle(tokens)
        slots = torch.tensor([slot for slot, _ in tokens], dtype=torch.int64)
        keys = torch.tensor([key for _, key in tokens], dtype=torch.float32)
        ours.update(keys.view(-1, HEADS, WIDTH), writes_of(slots, page_tokens))
        for page, written in cache.keys.items():
            for head in range(HEADS):
                for channel in range(WIDTH):
                    column = [key[head][channel] for key in written]
                    greatest = ours.bounds[head, page, channel]
                    least = -ours.bounds[head, page, WIDTH + channel]
                    assert (least, greatest) == (min(column), max(column))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bounds_are_keys_themselves_in_each_dtype(dtype):
    keys = torch.randn(5, HEADS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = summaries(dtype=dtype)
    ours.update(keys, writes_of(torch.arange(5) + 8, page_tokens=8))
    assert torch.equal(ours.bounds[:, 1, :WIDTH], keys.amax(dim=0))
    assert torch.equal(ours.bounds[:, 1, WIDTH:], (-keys).amax(dim=0))


def test_a_page_that_others_began_elsewhere_is_never_ranked_low():
    ours = summaries(dtype=torch.bfloat16)
    # The second token of page 3; the first came by a way that was not seen.
    ours.update(torch.zeros(1, HEADS, WIDTH).bfloat16(), writes_of(torch.tensor([13]), 4))
    assert (ours.bounds[:, 3] == torch.finfo(torch.bfloat16).max).all()


def test_a_step_of_padding_changes_nothing():
    ours = summaries()
    before = ours.bounds.clone()
    ours.update(torch.ones(2, HEADS, WIDTH), writes_of(torch.tensor([-1, -1]), 4))
    assert torch.equal(ours.bounds, before)


def test_one_long_chunk_does_not_make_pages_of_a_single_token_long():
    """What is held of a step grows with its tokens alone."""
    alone = writes_of(torch.arange(512), page_tokens=128)
    decodes = 1000 * 128 + 128 * torch.arange(300)
    mixed = writes_of(torch.cat((torch.arange(512), decodes)), page_tokens=128)
    for one, other in zip(dataclasses.astuple(alone), dataclasses.astuple(mixed), strict=True):
        assert other.numel() <= one.numel() + 300
