"""A search to run: on a landscape if the test asks for one, else on simulated servers."""

import shutil
import signal
from collections import defaultdict

import optuna
import pytest
from alembic.script import ScriptDirectory
from contracts.landscape import DEVICE, GOAL, Landscape, Recorder, workload
from contracts.questions import ONLY_KV_DTYPE, Questioned, Words, is_harmful
from sqlalchemy import Engine, event

from kvtune.autotune.explore.advice import Advice
from kvtune.autotune.interrupts import SIGNALS
from kvtune.autotune.limits import QualityRules
from kvtune.autotune.study import open_study
from kvtune.autotune.trial import Bench
from kvtune.autotune.tune import Budget, Rules, Tuning
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.kernels import device
from kvtune.profilers.load.client import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.store.database import open_store


@pytest.fixture(scope="session", autouse=True)
def avx512(tmp_path_factory):
    """The CPU that these tests see has AVX-512, without which a search offers no fp8."""
    file = tmp_path_factory.mktemp("proc") / "cpuinfo"
    file.write_text("flags\t\t: avx2 avx512f\n" + device._read_cpuinfo())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "CPUINFO", file)
        yield


@pytest.fixture(scope="session", autouse=True)
def patience():
    """A search waits for its model: on a busy machine it would go on without, and find others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Advice.__init__.__kwdefaults__, "limit_s", 300.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def migrations_read_once():
    """Alembic reads the files of migrations, ours and Optuna's, once and not for each store."""
    read = ScriptDirectory.from_config.__func__
    known = {}

    def from_config(cls, config):
        where = config.get_main_option("script_location")
        if where not in known:
            known[where] = read(cls, config)
        return known[where]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", classmethod(from_config))
        yield


@pytest.fixture(scope="session")
def new_history(migrations_read_once, tmp_path_factory):
    """The file of a history in which there is nothing yet but tables, Optuna's among them."""
    path = tmp_path_factory.mktemp("new") / "kvtune.db"
    with open_store(path) as opened:
        storage = optuna.storages.RDBStorage(opened.url)
        storage.remove_session()
        storage.engine.dispose()
    return path


@pytest.fixture
def store(new_history, tmp_path):
    """A new history. It need not survive a power cut, so it does not wait for the disk."""

    def hurry(connection, record):
        connection.execute("PRAGMA synchronous=OFF")

    shutil.copy(new_history, tmp_path / "kvtune.db")
    event.listen(Engine, "connect", hurry)
    with open_store(tmp_path / "kvtune.db") as opened:
        yield opened
    event.remove(Engine, "connect", hurry)


@pytest.fixture
def optuna_tables():
    """Asked for by tests of what the sampler has in the history, and of searches that go on."""


@pytest.fixture
def quick_sampler(request, monkeypatch):
    """Samplers keep trials in memory, which halves a search, but for tests of `optuna_tables`."""
    if "optuna_tables" not in request.fixturenames:
        by_url = defaultdict(optuna.storages.InMemoryStorage)
        monkeypatch.setattr("kvtune.autotune.search.RDBStorage", by_url.__getitem__)


@pytest.fixture
def landscape(quick_sampler):
    """The landscape that every search of the test measures on; change its fields."""
    return Landscape()


@pytest.fixture
def tuning_on(store, tmp_path, request):
    """Makes a `Tuning`; on the landscape of the test if it has one, else on simulated servers."""

    def make(
        *,
        name=None,
        goal=GOAL,
        model="org/model",
        base=None,
        environment=None,
        engine=None,
        plan=None,
        reporter=None,
        on=None,
        seed=0,
        budget=None,
        **rules,
    ):
        engine = engine or SimulatedEngine()
        plan = plan or LoadPlan(ClosedLoop(4), warmup_requests=0)
        load = on or workload()
        budget = budget or Budget(trials=6)
        study = open_study(
            store,
            name=name,
            model=model,
            served_model_name=None,
            engine=engine.describe(),
            device=DEVICE,
            workload=load,
            plan=plan,
            goal=goal,
            base_arguments=base or {},
            environment=environment or {},
            repeats=budget.repeats,
            seed=seed,
        )
        ground = {}
        if "landscape" in request.fixturenames:
            made = request.getfixturevalue("landscape")
            ground = {"clock": made.clock, "runner": made.run_trial}
        return Tuning(
            study=study,
            store=store,
            bench=Bench(
                engine=engine,
                model=model,
                served_model_name=None,
                environment=environment or {},
                plan=plan,
                goal=goal,
                log_dir=tmp_path / "logs",
                reporter=reporter or Recorder(),
                start_timeout_s=120,
            ),
            workload=load,
            device=DEVICE,
            budget=budget,
            rules=Rules(seed=seed, **rules),
            **ground,
        )

    return make


@pytest.fixture
def questioned(monkeypatch, landscape):
    """Whom the search of a test asks; 8-bit formats are nine times as fast as all else."""
    made = Questioned()
    monkeypatch.setattr("kvtune.autotune.quality.trials.asked_suites", lambda: (Words(),))
    monkeypatch.setattr("kvtune.autotune.quality.subjects.ServerAsker", made.asker)
    monkeypatch.setattr("kvtune.autotune.replays.DYING_S", 0.0)
    landscape.serve = made.serve
    landscape.goodput = lambda arguments: 9.0 if is_harmful(arguments) else 1.0
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    yield made
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def questioned_search(tuning_on, questioned):
    """Makes a search of few trials that asks `questioned`."""

    def make(**changed):
        usual = {
            "base": ONLY_KV_DTYPE,
            "budget": Budget(trials=3, finalists=1, confirm_rounds=2),
            "quality": QualityRules(),
        }
        return tuning_on(engine=questioned.engine, **{**usual, **changed})

    return make
