"""Runs vLLM in this process, with Quest as asked, and tells what it answers and what Quest chose.

`quest_engine.py MODEL`, see `vllm_forks`, answers {"quest": ..., "calls": ..., "check": ...}.

`calls` are lists of prompts, as token ids, each answered together. With `check`, choices and
outputs of sparse rows are held against the reference engine's Quest over the keys and values that
their layer was given.
"""

from collections import defaultdict

from vllm_forks import greedy, serve, start

PAGE, TOKENS = 32, 24
LAYERS = (2, 4, 7)
"""Those that are held against the reference, the first sparse one and the last among them."""


def answers(model, quest, calls, kv_cache_dtype="auto", check=False):
    """What vLLM answers, greedily."""
    watch = Watch() if check else None
    engine = start(
        model,
        None if quest is None else {"quest": quest},
        max_model_len=6200,
        max_num_seqs=12,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=160 << 20,
        kv_cache_dtype=kv_cache_dtype,
    )
    draw = greedy(TOKENS, detokenize=False)
    ids, cached = [], []
    for prompts in calls:
        done = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], draw, use_tqdm=False
        )
        ids.append([list(request.outputs[0].token_ids) for request in done])
        cached.append([request.num_cached_tokens for request in done])
    from kvtune.engines.vllm.plugin.counters import counters

    figures = {name: counters().get(name) for name in ("pages_seen", "pages_read")}
    told = {"ids": ids, "cached": cached, **figures}
    return told | (watch.told() if watch else {})


class Watch:
    """Holds each sparse row of each layer against the reference."""

    def __init__(self):
        from kvtune.engines.vllm.plugin import quest

        self.rows, self.other_choices, self.error = 0, 0, 0.0
        watch, original = self, quest.impl_class

        def impl_class(stock, asked):
            class Watched(original(stock, asked)):
                def __init__(self, *given, **named):
                    super().__init__(*given, **named)
                    self.kept = defaultdict(dict)

                def forward(self, layer, query, key, value, kv_cache, metadata, output, **scales):
                    result = super().forward(
                        layer, query, key, value, kv_cache, metadata, output, **scales
                    )
                    if metadata is not None:
                        watch.see(self, layer, query, key, value, metadata, output, asked)
                    return result

            return Watched

        quest.impl_class = impl_class

    def see(self, impl, layer, query, key, value, metadata, output, asked):
        if int(layer.layer_name.split(".")[2]) not in LAYERS:
            return
        for token, slot in enumerate(metadata.slot_mapping.tolist()):
            if slot % PAGE == 0:
                impl.kept[slot // PAGE].clear()
            impl.kept[slot // PAGE][slot % PAGE] = (key[token].clone(), value[token].clone())
        sparse = metadata.quest.sparse
        if sparse is None:
            return
        parts = impl.num_kv_heads if asked.per_kv_head else 1
        chosen = sparse.metadata.block_table.view(len(sparse.tokens), parts, -1) // parts
        lengths = sparse.metadata.seq_lens.view(-1, parts)[:, 0].tolist()
        for row, token in enumerate(sparse.tokens.tolist()):
            self.see_row(
                impl,
                query[token],
                output[token],
                sparse.table[row, : sparse.held[row]].tolist(),
                chosen[row, :, : sparse.kept[row]].tolist(),
                lengths[row],
            )

    def see_row(self, impl, query, output, pages, chosen, length):
        import torch

        from kvtune.kernels.pages import page_bounds, page_scores
        from kvtune.kernels.topk import top_indices

        cells = [impl.kept[page] for page in pages]
        order = [(page, offset) for page, cell in enumerate(cells) for offset in range(len(cell))]
        keys = torch.stack([cells[page][offset][0] for page, offset in order], dim=1)
        values = torch.stack([cells[page][offset][1] for page, offset in order], dim=1)
        scores = page_scores(query, *page_bounds(keys, PAGE), "max")
        if len(chosen) == 1:
            scores = scores.mean(dim=0, keepdim=True)
        best = top_indices(scores[:, :-1], len(chosen[0]) - 1).tolist()
        heads = len(query) // len(chosen)
        for part, positions in enumerate(best):
            expected = [pages[position] for position in (*positions, len(pages) - 1)]
            self.rows += 1
            self.other_choices += expected != chosen[part]
            read = [n for n, (page, _) in enumerate(order) if pages[page] in chosen[part]]
            assert len(read) == length
            of_part = slice(part * len(keys) // len(chosen), (part + 1) * len(keys) // len(chosen))
            attended = torch.nn.functional.scaled_dot_product_attention(
                query[part * heads : (part + 1) * heads, None],
                keys[of_part, read],
                values[of_part, read],
                enable_gqa=True,
            )[:, 0]
            off = (attended - output[part * heads : (part + 1) * heads]).abs().max()
            self.error = max(self.error, float(off / attended.abs().max()))

    def told(self):
        return {"rows": self.rows, "other_choices": self.other_choices, "error": self.error}


if __name__ == "__main__":
    serve(answers)
