"""Ask a server for an answer."""

import json
import urllib.request


def complete(url, prompt, tokens):
    """Ask the model `m` for so many tokens, greedily; returns their ids."""
    with requested(url, prompt, tokens, return_token_ids=True) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


def requested(url, prompt, tokens, **more):
    """The same as an open answer; one that is closed before its end is given up by vLLM."""
    body = {
        "model": "m",
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=120)
