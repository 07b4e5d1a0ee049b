"""One cache layer without a model, fed with vectors that a test makes up."""

import torch

from kvtune.engines.reference.layer import LayerCache
from kvtune.engines.reference.layer_setup import LayerSetup
from kvtune.engines.reference.rope import Rope
from kvtune.policies.method import LayerShape
from kvtune.policies.method_stack import parse_stack

torch.set_num_threads(1)


def layer_cache(stack, *, query_heads=1, kv_heads=1, dim=8, scale=1.0, spans=(), index=0, layers=1):
    """An empty layer under a stack, in float32."""
    return LayerCache(
        LayerSetup(
            shape=LayerShape(index, layers, query_heads, kv_heads, dim, dim, 4),
            stack=parse_stack(stack),
            rope=Rope(10_000.0 ** (-torch.arange(0, dim, 2) / dim)),
            scale=scale,
            softcap=None,
            window_tokens=None,
            dtype=torch.float32,
            device=torch.device("cpu"),
            spans=tuple(spans),
        )
    )


def random_vectors(count, *, query_heads=1, kv_heads=1, dim=8, seed=0):
    """Queries [Hq, count, dim], keys and values [Hk, count, dim]."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (query_heads, kv_heads, kv_heads)
    return tuple(torch.randn(heads, count, dim, generator=generator) for heads in sizes)


def attending(rows, dim=8):
    """Vectors of one head in which query i attends to token j with weight rows[i][j] (scale 1).

    Key j is the j-th unit vector, and a query holds the logarithms of the weights that it wants.
    """
    queries = torch.zeros(1, len(rows), dim)
    for number, row in enumerate(rows):
        queries[0, number, : len(row)] = torch.tensor(row).log()
    keys = torch.eye(dim)[None, : len(rows)]
    return queries, keys, keys


def prompt(layer, vectors, chunk_tokens=None):
    """Process a whole prompt, in one piece or in chunks."""
    count = vectors[0].shape[1]
    for start in range(0, count, chunk_tokens or count):
        part = slice(start, min(start + (chunk_tokens or count), count))
        at = torch.arange(part.start, part.stop)
        _, seen = layer.prefill(*(x[:, part] for x in vectors), at)
    layer.finish_prefill(layer.choose(seen))


def decode(layer, vectors, position):
    """One generated token: vectors [H, 1, dim]; returns the attention's output [Hq, 1, dim]."""
    return layer.decode(*vectors, torch.tensor([position]))


def held(layer):
    """Positions held, one list a row (one row while all heads hold the same)."""
    group = layer.groups[0]
    return group.positions(group.keys).tolist()
