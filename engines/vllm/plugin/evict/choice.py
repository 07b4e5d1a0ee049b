"""Which pages go, by how much each token was attended to."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtune.engines.vllm.plugin.evict.orders import Choice
from kvtune.kernels.scores import pool1d
from kvtune.kernels.topk import top_indices
from kvtune.policies.plugin_config import PageEvictionConfig


def page_scores(received: Tensor, page_tokens: int, asked: PageEvictionConfig) -> Tensor:
    """The worth of each page of a request, from the attention that each token of it received.

    ChunkKV (2502.00299) with pages as chunks, and H2O (2306.14048): a page's sum. SnapKV
    (2404.14469): tokens are smoothed over their neighbours before the window; a page is worth what
    its best token is.

    Args:
        received: [n], of which the last `asked.window_tokens` are the window's own.
        page_tokens: tokens per page.
        asked: the method, and how it smooths.

    Returns:
        [ceil(n / page_tokens)] in float32.
    """
    if asked.method == "snapkv":
        before = len(received) - min(asked.window_tokens, len(received))
        pooled = pool1d(received[:before], asked.kernel_tokens, "avg")
        received = torch.cat((pooled, received.new_zeros(len(received) - before)))
    missing = -len(received) % page_tokens
    pages = torch.nn.functional.pad(received.float(), (0, missing)).view(-1, page_tokens)
    return pages.amax(dim=1) if asked.method == "snapkv" else pages.sum(dim=1)


def pages_to_drop(scores: Tensor, choice: Choice) -> list[int]:
    """The pages, ascending, that a request loses; `scores` as from `page_scores`.

    Of pages of the same worth the first one stays.
    """
    among = torch.tensor([page for page in range(len(scores)) if choice.among >> page & 1])
    goes = torch.ones(len(among), dtype=torch.bool)
    goes[top_indices(scores[among], len(among) - choice.count)] = False
    gone: list[int] = among[goes].tolist()
    return gone
