"""Which pages of a prompt go, by how much its end attended to each token."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtune.kernels.scores import pool1d
from kvtune.kernels.topk import top_indices
from kvtune.policies.page_budget import PageBudget
from kvtune.policies.plugin_config import PageEvictionConfig


def page_scores(received: Tensor, page_tokens: int, asked: PageEvictionConfig) -> Tensor:
    """The worth of each page of a prompt, from the attention that each token of it received.

    ChunkKV (2502.00299) with pages as chunks: a page's sum. SnapKV (2404.14469): tokens are
    smoothed over their neighbours before the window; a page is worth what its best token is.

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


def pages_to_drop(received: Tensor, budget: PageBudget, asked: PageEvictionConfig) -> list[int]:
    """The pages, ascending, that a prompt loses; `received` [n] as in `page_scores`.

    Of pages of the same worth the first one stays.
    """
    tokens = len(received)
    scores = page_scores(received, budget.block_tokens, asked)
    scores[: budget.sink_pages(tokens)] = float("inf")
    scores[budget.first_window_page(tokens) :] = float("inf")
    stays = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    stays[top_indices(scores, budget.kept(tokens))] = True
    gone: list[int] = (~stays).nonzero().flatten().tolist()
    return gone
