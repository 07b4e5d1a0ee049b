"""Runs vLLM in this process, with Quest as asked, and tells what it answers and what Quest chose.

`calls` are lists of prompts, as token ids, each answered together. With `check`, choices and
outputs of sparse rows are held against the reference engine's Quest over the keys and values that
their layer was given, and as an int8 store keeps them where that is asked for. `engine` are
arguments of `LLM` beside those here.
"""

from collections import defaultdict

from small_vllm import answer, start

PAGE, TOKENS = 32, 24
LAYERS = (2, 4, 7)
"""Those that are held against the reference, the first sparse one and the last among them."""


def answers(model, asked, calls, tokens=TOKENS, check=False, **engine):
    """What vLLM answers, greedily."""
    watch = Watch(rounded if "store" in asked else unchanged) if check else None
    sizes = {"max_model_len": 2800, "max_num_seqs": 12, "kv_cache_memory_bytes": 160 << 20}
    llm = start(model, asked, **{**sizes, **engine})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def _preempt_request(request, *rest, **named):
        preempted.append(request.num_output_tokens)
        preempt(request, *rest, **named)

    scheduler._preempt_request = _preempt_request
    done = [answer(llm, prompts, tokens) for prompts in calls]
    from kvtune.engines.vllm.plugin.counters import counters

    figures = {name: counters().get(name) for name in ("pages_seen", "pages_read")}
    return {"calls": done, "preempted": preempted, **figures, **(watch.told() if watch else {})}


def unchanged(vectors):
    """As stock pages keep them."""
    return vectors


def rounded(vectors):
    """As an int8 store keeps them."""
    from kvtune.kernels.token_head import dequantize_token_head, quantize_token_head

    return dequantize_token_head(*quantize_token_head(vectors, "int8"), "int8")


class Watch:
    """Holds each sparse row of each layer against the reference."""

    def __init__(self, as_stored):
        from kvtune.engines.vllm.plugin import quest

        self.as_stored = as_stored
        self.rows, self.missed, self.error = 0, 0.0, 0.0
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
        key, value = self.as_stored(key.clone()), self.as_stored(value.clone())
        for token, slot in enumerate(metadata.slot_mapping.tolist()):
            if slot % PAGE == 0:
                impl.kept[slot // PAGE].clear()
            impl.kept[slot // PAGE][slot % PAGE] = (key[token], value[token])
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

        cells = [impl.kept[page] for page in pages]
        # Tokens after it may be there already, where an answer is computed again.
        in_last = length - (len(chosen[0]) - 1) * PAGE
        order = [
            (page, offset) for page, cell in enumerate(cells[:-1]) for offset in range(len(cell))
        ]
        order += [(len(cells) - 1, offset) for offset in range(in_last)]
        keys = torch.stack([cells[page][offset][0] for page, offset in order], dim=1)
        values = torch.stack([cells[page][offset][1] for page, offset in order], dim=1)
        scores = page_scores(query, *page_bounds(keys, PAGE), "max")
        if len(chosen) == 1:
            scores = scores.mean(dim=0, keepdim=True)
        heads = len(query) // len(chosen)
        for part, read_pages in enumerate(chosen):
            self.rows += 1
            assert read_pages[-1] == pages[-1], "the page that is written is always read"
            of_page = dict(zip(pages, scores[part].tolist(), strict=True))
            read_old, left = read_pages[:-1], set(pages) - set(read_pages)
            assert read_old == [page for page in pages[:-1] if page not in left]
            if read_old:
                above = max(map(of_page.get, left)) - min(map(of_page.get, read_old))
                self.missed = max(self.missed, above / float(scores[part].abs().max()))
            read = [n for n, (page, _) in enumerate(order) if pages[page] in read_pages]
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
        """How many choices were seen, and the worst of them.

        `missed`: how far a page that was left out is above one that was read, to the greatest score
        of its row. `error`: of an output, to the greatest of its part.
        """
        return {"rows": self.rows, "missed": self.missed, "error": self.error}
