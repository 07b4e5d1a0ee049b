"""The tables of a store, and those of Optuna beside them."""

import optuna
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from contracts.store_fixtures import StoreFixtures, lines
from contracts.store_values import a_full_history
from optuna.storages import RDBStorage
from sqlalchemy import inspect, text

from kvtune.errors import StoreError
from kvtune.store import open_store, schema
from kvtune.store.location import locate
from kvtune.store.migrations import HEAD, migration_options, upgrade

OPTUNA_TABLES = {"studies", "trials", "trial_params", "trial_values", "alembic_version"}


class SchemaContract(StoreFixtures):
    """Migrations, and Optuna in the same database."""

    def test_migrations_build_the_tables_that_the_code_expects(self, store):
        options = migration_options()
        tables = options.pop("target_metadata")
        with store.read() as connection:
            context = MigrationContext.configure(connection, opts=options)
            assert compare_metadata(context, tables) == []

    def test_store_of_the_first_version_opens(self, url):
        with open_store(url) as store, store.write() as connection:
            schema.metadata.drop_all(connection)
            connection.execute(text("DROP TABLE kvtune_alembic_version"))
            upgrade(connection, "0001")
        with open_store(url) as store:
            a_full_history(store)
            self.test_migrations_build_the_tables_that_the_code_expects(store)

    def test_store_of_a_newer_kvtune_is_refused(self, url):
        with open_store(url) as store, store.write() as connection:
            connection.execute(text("UPDATE kvtune_alembic_version SET version_num = '9999'"))
        with pytest.raises(StoreError, match="newer kvtune: its schema is 9999") as caught:
            open_store(url)
        assert HEAD in caught.value.message
        assert "pip install -U kvtune" in caught.value.fix

    @pytest.mark.parametrize("optuna_first", [True, False])
    def test_optuna_lives_in_the_same_database(self, url, optuna_first):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        if optuna_first:
            self.tell_optuna(url, 1.0)
        with open_store(url) as store:
            a_full_history(store)
            before = lines(store)
            self.tell_optuna(store.url, 2.0)
            self.tell_optuna(store.url, 3.0)
        with open_store(url) as store:
            assert lines(store) == before
            with store.read() as connection:
                names = set(inspect(connection).get_table_names())
                assert {n for n in names if n.startswith("kvtune_")} == {
                    *schema.metadata.tables,
                    "kvtune_alembic_version",
                }
                assert names >= OPTUNA_TABLES
            self.test_migrations_build_the_tables_that_the_code_expects(store)
        assert self.tell_optuna(url, 4.0) == 4.0

    def tell_optuna(self, url: str, value: float) -> float:
        """Open Optuna's storage, add a trial to its study and return the best value."""
        storage = RDBStorage(open_url(url))
        study = optuna.create_study(
            storage=storage, study_name="chat", direction="maximize", load_if_exists=True
        )
        trial = study.ask()
        trial.suggest_int("block_size", 16, 128)
        study.tell(trial, value)
        best = study.best_value
        storage.remove_session()
        storage.engine.dispose()
        return best


def open_url(url: str) -> str:
    """The URL of a store as kvtune gives it to Optuna."""
    return locate(url).url.render_as_string(hide_password=False)
