"""A replayed prompt leaves the same cache as the prompt itself."""

import torch
from contracts.tiny_models import tiny_engine, tokens

from kvtune.engines.reference.recording import record, replay


def test_a_replayed_prompt_goes_on_like_the_prompt_itself():
    engine = tiny_engine()
    prompt = tokens(30)
    recording = record(engine, prompt)
    run, again = engine.start(), engine.start()
    (logits,) = engine.prefill([run], [prompt])
    replay(engine, again, recording)
    assert torch.equal(recording.logits, logits)
    expected = engine.decode([run], [[3]])[0]
    assert torch.equal(engine.decode([again], [[3]])[0], expected)
    assert run.measured() == again.measured()
