import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtune.engines.base import RunningServer, ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine

# Test folders are no packages: this is how the tests here find what they share.
sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("cache_bench", "raw_client")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    arguments = {
        "simulate-time-scale": 0.02,
        "kv-cache-memory-bytes": "64M",
        "max-model-len": 2048,
        "enable-prompt-tokens-details": True,
    }
    log_path = tmp_path_factory.mktemp("simulated") / "server.log"
    with (
        SimulatedEngine() as engine,
        engine.launch(ServerSpec("tiny", arguments=arguments), log_path=log_path) as running,
    ):
        yield running
