"""Gives the same texts to vLLM with a policy and to the reference engine with stacks of methods.

With `asked`, vLLM answers `prompts` greedily, one after the other, under what the plugin is asked
for. With `stacks`, the reference engine is led along prompts and answers that are known, `texts`,
and tells under each stack what it thinks of the tokens that vLLM named, `named`. Both tell what
each answered token attended to. A stack is {"stack": ..., and maybe

"by_pages": each page of a text is a prompt of its own, so that methods act between pages; else an
    answer is decoded token by token,
"exact": whether a prompt attends to itself in full precision,
"protected": tokens [first, end) that may not be dropped,
"all_layers": ChunkKV ranks once for all layers, by the attention of all of them together,
"values_by_page": KIVI quantizes values as it does keys, when their page is full}.
"""

from small_vllm import greedy, start

PAGE, TOP = 32, 20


def answers(model, asked=None, prompts=(), tokens=0, stacks=(), texts=(), named=()):
    """`named` of each answered token, [[id, log probability], ...], and what it `sees`.

    What is seen are runs of tokens, [first, end], by place of the token, by layer, and by KV head
    where heads differ.
    """
    if not stacks:
        return told_by_vllm(model, asked, prompts, tokens)
    from kvtune.engines.reference.engine import ReferenceEngine

    engine = ReferenceEngine.load(model)
    return [told_by_reference(engine, texts, named, **stack) for stack in stacks]


def runs(places):
    """Ascending places as runs of neighbours."""
    found = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1][1] += 1
        else:
            found.append([place, place + 1])
    return found


def told_by_vllm(model, asked, prompts, tokens):
    """What vLLM answers."""
    watch = ServedWatch()
    llm = start(model, asked, max_model_len=2048)
    told = {"prompts": [], "ids": [], "named": [], "sees": []}
    for prompt in prompts:
        watch.sees = {}
        (done,) = llm.generate([prompt], greedy(tokens, logprobs=TOP), use_tqdm=False)
        told["prompts"].append(list(done.prompt_token_ids))
        told["ids"].append(list(done.outputs[0].token_ids))
        told["named"].append(
            [
                [[number, each.logprob] for number, each in of_token.items()]
                for of_token in done.outputs[0].logprobs
            ]
        )
        told["sees"].append(watch.sees)
    return told


class ServedWatch:
    """Notes what the kernels of decode steps are told to read; one request at a time."""

    def __init__(self):
        from kvtune.engines.vllm.plugin import backend, quest

        self.sees = {}
        watch, builder_class, quest_class = self, backend.builder_class, quest.impl_class

        def watched_builder(stock, asked, impl):
            class Watched(builder_class(stock, asked, impl)):
                def build(self, common_prefix_len, common, fast_build=False):
                    metadata = super().build(common_prefix_len, common, fast_build)
                    if asked.quest is None:
                        watch.see_step(common, metadata, len(self.layer_names))
                    return metadata

            return Watched

        def watched_quest(stock, asked):
            class Watched(quest_class(stock, asked)):
                def forward(self, layer, query, key, value, kv_cache, metadata, *rest, **scales):
                    done = super().forward(
                        layer, query, key, value, kv_cache, metadata, *rest, **scales
                    )
                    if metadata is not None:
                        watch.see_quest(int(layer.layer_name.split(".")[2]), metadata, self, asked)
                    return done

            return Watched

        backend.builder_class, quest.impl_class = watched_builder, watched_quest

    def see_step(self, common, metadata, layers):
        """All layers read the same pages."""
        if common.query_start_loc_cpu.tolist() != [0, 1]:
            return
        length, left = int(common.seq_lens[0]), int(metadata.seq_lens[0])
        table = common.block_table_tensor[0, : -(-length // PAGE)].tolist()
        # A page that the text lost may have come back to it further on: the later place counts.
        places = {page: place for place, page in enumerate(table)}
        read = metadata.block_table[0, : -(-left // PAGE)].tolist()
        seen = [tokens_of([places[page] for page in read], length)]
        self.sees[length - 1] = dict.fromkeys(range(layers), seen)

    def see_quest(self, layer, metadata, impl, asked):
        """A layer reads pages of its own."""
        if metadata.query_start_loc.tolist() != [0, 1]:
            return
        length, sparse = int(metadata.seq_lens[0]), metadata.quest.sparse
        if sparse is None or layer < asked.dense_layers:
            seen = [[[0, length]]]
        else:
            table = sparse.table[0].tolist()
            heads = impl.num_kv_heads if asked.per_kv_head else 1
            seen = [
                tokens_of([table.index(page // heads) for page in row], length)
                for row in sparse.metadata.block_table.tolist()
            ]
        self.sees.setdefault(length - 1, {})[layer] = seen


def tokens_of(pages, length):
    """The tokens of ascending pages, as runs; the last page ends with the text."""
    return runs(
        place for page in pages for place in range(page * PAGE, min((page + 1) * PAGE, length))
    )


def told_by_reference(
    engine,
    texts,
    named,
    *,
    stack,
    by_pages=False,
    exact=True,
    protected=(),
    all_layers=False,
    values_by_page=False,
):
    """What the reference engine thinks of the same tokens."""
    from kvtune.policies.eviction import Span
    from kvtune.policies.method_stack import parse_stack
    from kvtune.policies.methods.kivi import KeyPlane, ValuePlane

    if values_by_page:
        ValuePlane.coded_of = staticmethod(KeyPlane.coded_of)
    methods = parse_stack(stack)
    told = {"named": [], "sees": []}
    with ReferenceWatch() as watch:
        for (prompt, answer), names in zip(texts, named, strict=True):
            watch.begin(len(prompt))
            spans = [Span(first, end, protected=True) for first, end in protected]
            if all_layers:
                # Chunks that are protected are kept, and these fill the budget.
                spans = chosen_by_all_layers(engine, methods, prompt, spans)
            sequence = engine.start(methods, spans, exact_prefill=exact)
            logprobs = led(engine, sequence, prompt, answer, by_pages).float().log_softmax(-1)
            told["named"].append(
                [
                    [[number, float(row[number])] for number, _ in each]
                    for row, each in zip(logprobs, names, strict=True)
                ]
            )
            told["sees"].append(watch.sees)
    return told


def chosen_by_all_layers(engine, methods, prompt, spans):
    """The chunks that ChunkKV would choose by the sum of all layers' scores, as spans."""
    import torch

    from kvtune.engines.reference.recording import record
    from kvtune.policies.eviction import Span

    places, total = torch.arange(len(prompt)), torch.zeros(len(prompt))
    sequence = engine.start(methods, spans)
    for layer, seen_there in zip(sequence.layers, record(engine, prompt).layers, strict=True):
        seen = layer.show(*seen_there, places)
        (evictor,) = layer.evictors
        total += evictor.window.looking_at(seen).attention_received().sum((0, 1))
    size = evictor.method.chunk_tokens
    chunks = evictor._best(total, seen).tolist()
    return [Span(chunk * size, (chunk + 1) * size, protected=True) for chunk in chunks]


def led(engine, sequence, prompt, answer, by_pages):
    """The logits that each token of an answer is drawn from, [tokens, V]."""
    import torch

    if by_pages:
        ids = [*prompt, *answer[:-1]]
        every = [
            engine.prefill([sequence], [ids[first : first + PAGE]], every=True)[0]
            for first in range(0, len(ids), PAGE)
        ]
        return torch.cat(every)[len(prompt) - 1 :]
    first = engine.prefill([sequence], [prompt])[0]
    more = [engine.decode([sequence], [[token]])[0][-1] for token in answer[:-1]]
    return torch.stack([first, *more])


class ReferenceWatch:
    """Notes what each token after a prompt attends to."""

    def __enter__(self):
        from kvtune.engines.reference.layer import LayerCache

        self.attend, watch = LayerCache._attend, self

        def _attend(cache, seen, window_tokens):
            watch.see(cache.setup.shape.index, seen)
            return watch.attend(cache, seen, window_tokens)

        LayerCache._attend = _attend
        self.begin(0)
        return self

    def __exit__(self, *_):
        from kvtune.engines.reference.layer import LayerCache

        LayerCache._attend = self.attend

    def begin(self, prompt_tokens):
        """A new text."""
        self.prompt_tokens, self.sees = prompt_tokens, {}

    def see(self, layer, seen):
        """The keys at or before each query."""
        for place in seen.query_positions.tolist():
            if place >= self.prompt_tokens:
                self.sees.setdefault(place, {})[layer] = [
                    runs(held for held in row if held <= place)
                    for row in seen.key_positions.tolist()
                ]
