"""The engine on a real vLLM: both starts serve alike, failures are told, nothing is left."""

import collections
import concurrent.futures
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from contracts.completions import complete
from contracts.processes import is_alive
from contracts.processor import DTYPE, KV_WIDTH, eager, kv_mib, needs_avx512

from kvtune.engines.base import ServerSpec
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.errors import EngineError
from kvtune.types import FailureClass

pytestmark = pytest.mark.integration

ARGUMENTS = eager(256)
SHORT = list(range(100, 140))
LONG = [(position * 7919) % 40_000 + 100 for position in range(1500)]
BATCH = [[(position * step) % 40_000 + 50 for position in range(300)] for step in (3, 4, 5)]


@pytest.fixture
def launch(warm, shallow, tmp_path):
    def launch(engine=warm, served=shallow, **changed):
        arguments = {name.replace("_", "-"): value for name, value in changed.items()}
        spec = ServerSpec(str(served), served_model_name="m", arguments={**ARGUMENTS, **arguments})
        return engine.launch(spec, log_path=tmp_path / "server.log", start_timeout_s=200)

    return launch


def answer(server, prompt, tokens):
    return complete(server.endpoint.url, prompt, tokens)


def complete_together(server, prompts, tokens):
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: answer(server, prompt, tokens), prompts))


def process(server, name):
    children = psutil.Process(server.endpoint.pid).children(recursive=True)
    return next(child for child in children if name in child.name())


def binding(server):
    """How many of the worker's threads may run on which CPUs."""
    worker = process(server, "Worker").pid
    masks = [
        (thread / "status").read_text().partition("Cpus_allowed_list:")[2].split()[0]
        for thread in Path(f"/proc/{worker}/task").iterdir()
    ]
    return collections.Counter(masks)


def decode_cpu_s(server, seed):
    """Processor seconds of the worker for four sequences that decode together."""
    prompts = [
        [(position * (step + 3) + seed) % 40_000 + 50 for position in range(64)]
        for step in range(4)
    ]
    worker = process(server, "Worker")
    before = worker.cpu_times()
    complete_together(server, prompts, 48)
    after = worker.cpu_times()
    return after.user + after.system - before.user - before.system


def test_a_forked_server_serves_exactly_as_a_started_one(warm, launch):
    with (
        VllmEngine(start="cold") as cold,
        launch(cold) as started,
        launch(warm) as forked,
    ):
        assert (started.effective.start_kind, forked.effective.start_kind) == ("cold", "warm")
        same = {"start_kind": None}
        assert started.effective.model_copy(update=same) == forked.effective.model_copy(update=same)
        assert started.effective.kv_cache_size_tokens == 43_648
        assert started.effective.source == ("server_info", "log")
        assert started.warnings == forked.warnings == ()
        for prompt, tokens in ((SHORT, 48), (LONG, 32)):
            ids = answer(started, prompt, tokens)
            assert answer(forked, prompt, tokens) == ids
            assert len(set(ids)) > 1
        # Which requests share a step depends on when they arrive, and rounding on what shares one.
        answers = [complete_together(started, BATCH, 32) for _ in range(3)]
        assert any(complete_together(forked, BATCH, 32) in answers for _ in range(3))
        assert binding(started) == binding(forked)
        # Processor time and not speed, which depends on what else runs on this machine.
        ratios = [decode_cpu_s(forked, seed) / decode_cpu_s(started, seed) for seed in range(7)]
        assert 0.85 < statistics.median(ratios) < 1.18
        assert forked.start_s < started.start_s / 2


def test_the_cache_that_was_asked_for_is_the_cache_that_is_there(launch):
    with launch(block_size=64, kv_cache_memory_bytes=kv_mib(128), max_num_seqs=8) as server:
        effective = server.effective
    assert effective.block_size_tokens == 64
    assert effective.kv_cache_memory_bytes == KV_WIDTH * 128 << 20
    assert effective.kv_cache_size_tokens == effective.num_gpu_blocks * 64
    assert effective.max_num_seqs == 8
    assert effective.engine_version == "0.32.0"
    assert effective.model_dtype == DTYPE


@needs_avx512
def test_layers_that_are_skipped_keep_their_format_and_long_prompts_are_read_right(launch, model):
    fp8 = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0", "1", "28", "29"]}
    filler = "On that day Ivo found a red lamp at the mill and took it to the chapel. " * 40
    prompt = f"{filler}The secret number is 7194. {filler}What is the secret number? It is"
    with launch(served=model, **fp8) as mixed, launch(served=model) as stock:
        # 26 of 30 layers take half of what they took: 160 blocks where stock has 91.
        assert (mixed.effective.num_gpu_blocks, stock.effective.num_gpu_blocks) == (160, 91)
        assert answer(mixed, prompt, 5) == answer(stock, prompt, 5)


@pytest.mark.parametrize(
    ("changed", "failure", "said", "fix"),
    [
        ({"block_size": 16}, FailureClass.BAD_ARGUMENT, "No common block size", "--block-size"),
        (
            {"kv_cache_memory_bytes": kv_mib(2)},
            FailureClass.DOES_NOT_FIT,
            "larger than the available KV cache memory",
            "--max-model-len 128 or less",
        ),
        (
            {"max_model_len": 100_000},
            FailureClass.BAD_ARGUMENT,
            "max_model_len (100000) is greater",
            "arguments",
        ),
    ],
)
def test_a_configuration_that_cannot_start_says_why(launch, changed, failure, said, fix):
    with pytest.raises(EngineError) as caught:
        launch(**changed)
    assert caught.value.failure is failure
    assert said in caught.value.message
    assert fix in caught.value.fix


def test_an_ignored_attention_backend_is_a_warning(launch):
    with launch(attention_backend="FLASH_ATTN") as server:
        (warning,) = server.warnings
    assert "does not use the attention backend FLASH_ATTN" in warning


@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
def test_an_engine_that_is_killed_under_load_is_noticed_within_seconds(launch, victim):
    with launch() as server:

        def load():
            with contextlib.suppress(OSError):
                answer(server, SHORT, 1500)

        client = threading.Thread(target=load)
        client.start()
        time.sleep(1)
        assert server.failure() is None
        tree = psutil.Process(server.endpoint.pid).children(recursive=True)
        process(server, victim).kill()
        start_s = time.monotonic()
        while server.failure() is None and time.monotonic() - start_s < 20:
            time.sleep(0.05)
        assert server.failure().failure is FailureClass.CRASH_UNDER_LOAD
        assert "unexpectedly" in server.failure().message
        client.join()
    assert not any(is_alive(child) for child in tree)


def test_the_installed_parser_judges_arguments(warm, shallow):
    good, abbreviated, wrong, unknown = warm.check_many(
        [
            ARGUMENTS,
            {"max-num-seq": 8},
            {"max-num-seqs": "many"},
            {"calculate-kv-scales": True},
        ],
        str(shallow),
    )
    assert good == ()
    assert "did you mean --max-num-seqs?" in abbreviated[0]
    assert "invalid int value: 'many'" in wrong[0]
    assert "is not an option" in unknown[0]
    assert {"kv-cache-dtype", "no-enable-prefix-caching"} <= warm.known_options()


KVTUNE = """
import sys
from pathlib import Path
from kvtune.engines.base import ServerSpec
from kvtune.engines.vllm.engine import VllmEngine
start, model, folder, *rest = sys.argv[1:]
arguments = {"enforce-eager": True, "kv-cache-memory-bytes": "256M", "max-model-len": 2048}
engine = VllmEngine(start=start)
server = engine.launch(ServerSpec(model, arguments=arguments), log_path=Path(folder) / "log")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("start", "when", "number"),
    [("warm", "ready", signal.SIGKILL), ("cold", "starting", signal.SIGINT)],
)
def test_no_vllm_outlives_a_kvtune_that_is_ended(shallow, tmp_path, start, when, number):
    kvtune = subprocess.Popen(
        [sys.executable, "-c", KVTUNE, start, str(shallow), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with kvtune:
        if when == "ready":
            assert kvtune.stdout.readline() == b"ready\n"
        else:
            while "EngineCore" not in str(names := [c.name() for c in children(kvtune)]):
                assert kvtune.poll() is None, names
                time.sleep(0.2)
        tree = children(kvtune)
        assert len(tree) >= 3
        os.killpg(kvtune.pid, number)
        kvtune.wait(30)
    gone, alive = psutil.wait_procs(tree, timeout=20)
    assert alive == []
    assert len(gone) == len(tree)


def children(kvtune):
    return psutil.Process(kvtune.pid).children(recursive=True)


def test_the_sockets_of_its_servers_go_with_an_engine(launch):
    folder = Path(tempfile.gettempdir())

    def sockets():
        return {path for path in folder.iterdir() if path.is_socket()}

    before = sockets()
    with VllmEngine() as engine:
        known = set(folder.glob("kvtune-*"))
        with launch(engine):
            ours = [
                path
                for path in folder.glob("kvtune-*/*")
                if path.is_socket() and path.parent not in known
            ]
        assert ours, "or vLLM puts them elsewhere by now"
    assert not any(path.parent.exists() for path in ours)
    assert sockets() - before == set()
