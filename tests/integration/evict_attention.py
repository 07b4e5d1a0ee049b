"""Computes a model's attention apart from vLLM, with whole matrices, where pages leave."""


def answers(model, ids, page_tokens, evictions):
    """What each page got until each eviction, and what the model answers to each token.

    `evictions`: [first token, mask]; tokens from that place on do not see the pages of the mask.
    """
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    places = torch.arange(len(ids))
    seen = places <= places[:, None]
    for first_token, mask in evictions:
        gone = torch.tensor([bool(mask >> place // page_tokens & 1) for place in range(len(ids))])
        seen &= ~(gone & (places[:, None] >= first_token))
    hidden = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    with torch.inference_mode():
        told = net(torch.tensor([ids]), attention_mask=hidden[None, None], output_attentions=True)
    assert len(told.attentions) == net.config.num_hidden_layers
    weights = sum(each[0].mean(0) for each in told.attentions)
    pages = []
    for first_token, _ in evictions:
        got = torch.nn.functional.pad(weights[:first_token].sum(0), (0, -len(ids) % page_tokens))
        pages.append(got.view(-1, page_tokens).sum(1).tolist())
    best = told.logits[0].log_softmax(-1).topk(2)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return {"pages": pages, "best": [list(map(list, zip(*pair, strict=True))) for pair in pairs]}
