import pytest

from kvtune.engines.vllm.secret_names import refuse_secret_arguments, refuse_secrets_in_command
from kvtune.errors import BadInput


@pytest.mark.parametrize(
    ("arguments", "variable"),
    [({"api-key": "sk-1"}, "VLLM_API_KEY"), ({"hf_token": "hf_1"}, "HF_TOKEN")],
)
def test_a_secret_argument_is_refused_without_repeating_it(arguments, variable):
    with pytest.raises(BadInput) as caught:
        refuse_secret_arguments({"max-model-len": 64, **arguments})
    assert f"export {variable}=" in caught.value.fix
    assert not set(arguments.values()) & set(f"{caught.value.message} {caught.value.fix}".split())


def test_a_stored_login_is_no_secret_argument():
    refuse_secret_arguments({"hf-token": True, "max-num-batched-tokens": 2048})


@pytest.mark.parametrize(
    "command",
    [
        "docker run -e HF_TOKEN=hf_1 image {args}",
        "docker run --env='VLLM_API_KEY=sk-1' image {args}",
        "env HF_TOKEN='hf_1' vllm serve {args}",
        "sh -c 'HF_TOKEN=\"hf_1\" exec vllm serve {args}'",
        "vllm serve {args} --api-key sk-1",
        "vllm serve {args} --hf-token=hf_1",
    ],
)
def test_a_secret_in_a_command_is_refused_without_repeating_it(command):
    with pytest.raises(BadInput) as caught:
        refuse_secrets_in_command(command)
    said = f"{caught.value.message} {caught.value.fix}"
    assert "hf_1" not in said
    assert "sk-1" not in said


@pytest.mark.parametrize(
    "command",
    [
        "docker run --gpus all -e HF_TOKEN -e VLLM_SERVER_DEV_MODE=1 image {args}",
        "sh -c 'HF_TOKEN=$MINE exec vllm serve {args} --api-key $KEY'",
        "ssh -o ServerAliveInterval=30 host vllm serve {args} --hf-token --max-num-seqs=4",
    ],
)
def test_a_command_that_only_names_its_secrets_is_taken(command):
    refuse_secrets_in_command(command)
