"""What leaves a store and comes into another."""

import io
import json

import pytest
from contracts.store_fixtures import StoreFixtures, exported, lines
from contracts.store_values import (
    DEVICE,
    a_full_history,
    a_key,
    a_run,
    a_study,
    a_trial,
    measure,
    ok,
)

from kvtune.errors import BadInput


class TransferContract(StoreFixtures):
    """Export and import."""

    def test_export_into_an_empty_store_exports_the_same(self, store, other_store):
        a_full_history(store)
        kinds = {json.loads(line)["kind"] for line in lines(store)}
        assert len(kinds) == 15
        report = other_store.import_(exported(store))
        assert lines(other_store) == lines(store)
        assert sum(report.added.values()) == len(lines(store))
        assert other_store.records("chat", 0) == store.records("chat", 0)
        assert other_store.trials("chat") == store.trials("chat")
        assert other_store.studies() == store.studies()
        assert other_store.decision_row("chat") == store.decision_row("chat") is not None
        assert other_store.steps("chat") == store.steps("chat") != []
        assert other_store.ceilings(DEVICE.key) == store.ceilings(DEVICE.key) is not None
        assert other_store.forecasts() == store.forecasts() != []
        assert other_store.quality_reports() == store.quality_reports() != []
        assert other_store.quality_answers("a key") == store.quality_answers("a key") is not None

    def test_importing_twice_adds_nothing(self, store, other_store):
        a_full_history(store)
        first = other_store.import_(exported(store))
        second = other_store.import_(exported(store))
        own = store.import_(exported(store))
        assert second.added == own.added == {}
        assert second.skipped == own.skipped == first.added
        assert lines(other_store) == lines(store)

    def test_export_of_one_study_holds_what_it_refers_to(self, store, other_store):
        a_full_history(store)
        other_store.import_(exported(store, "batch"))
        assert [summary.name for summary in other_store.studies()] == ["batch"]
        assert other_store.trials("batch") == store.trials("batch")
        assert other_store.records("batch", 0) == store.records("chat", 0)
        assert other_store.profiles() == []
        assert other_store.ceilings(DEVICE.key) is None
        assert other_store.forecasts() == []
        assert other_store.quality_reports() == []
        assert other_store.quality_answers("a key") is None

    def test_export_of_a_study_holds_the_quality_of_its_trials(self, store, other_store):
        a_full_history(store)
        other_store.import_(exported(store, "chat"))
        assert other_store.quality_reports() == store.quality_reports("chat") != []

    def test_running_attempt_is_exported_once_it_has_ended(self, store, other_store):
        study = a_study(store)
        attempt = store.begin_attempt(study, a_trial(), a_key(a_trial()))
        other_store.import_(exported(store))
        assert other_store.trial("chat", 0).attempts == ()
        assert other_store.studies()[0].trials == {"stopped": 1}
        store.finish_attempt(attempt, ok(), [a_run()])
        other_store.import_(exported(store))
        assert other_store.trials("chat") == store.trials("chat")

    def test_imported_study_whose_name_is_taken_gets_another(self, store, other_store):
        study = a_study(store)
        measure(store, study, a_trial(), ok())
        own = a_study(other_store)
        report = other_store.import_(exported(store))
        name = f"chat-{study.id[:6]}"
        assert report.renamed == {"chat": name}
        assert other_store.study("chat") == own
        assert other_store.trial(name, 0).measurement == ok()
        assert other_store.import_(exported(store)).added == {}

    def test_study_that_went_on_in_two_stores_is_refused(self, store, other_store):
        study = a_study(store)
        other_store.import_(exported(store))
        measure(store, study, a_trial(0, 16), ok())
        measure(other_store, "chat", a_trial(0, 32), ok())
        before = lines(other_store)
        with pytest.raises(BadInput, match=r"line 3: .* another trial 0"):
            other_store.import_(exported(store))
        assert lines(other_store) == before

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("{", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ("[]", "not a JSON object"),
            ('{"kind": "surprise", "schema_version": 1}', "unknown kind 'surprise'"),
            ('{"kind": "study", "schema_version": 2}', "a newer kvtune"),
            ('{"kind": "study", "schema_version": 1, "name": "x"}', "study, id: Field required"),
            (
                '{"kind": "decision", "schema_version": 1, "id": "1", "study_id": "nope", '
                '"created_at": "", "decision": {"outcome": "winner", "recommended": 1, '
                '"baseline": null}}',
                "refers to a row that neither",
            ),
            (
                '{"kind": "attempt", "schema_version": 1, "id": "1", "study_id": "nope", '
                '"number": 99999999999999999999999999, "status": "stopped", "host": "", "pid": 1, '
                '"process": "", "started_at": ""}',
                "a value that the store cannot keep",
            ),
        ],
    )
    def test_bad_line_is_named_and_nothing_is_imported(self, store, other_store, line, says):
        a_study(store)
        text_ = exported(store).getvalue() + "\n" + line + "\n"
        with pytest.raises(BadInput, match=f"line 4: .*{says}"):
            other_store.import_(io.StringIO(text_))
        assert other_store.studies() == []

    def test_imported_study_with_an_impossible_name_is_refused(self, store, other_store):
        a_study(store)
        text_ = exported(store).getvalue().replace('"chat"', '"a/b"')
        with pytest.raises(BadInput, match="line 2: 'a/b' cannot be the name"):
            other_store.import_(io.StringIO(text_))

    @pytest.mark.parametrize("content", ["", "\n", "{}\n", "hello\n", '{"kind":"study"}\n'])
    def test_file_that_is_not_an_export_is_refused(self, store, content):
        with pytest.raises(BadInput, match="line 1: "):
            store.import_(io.StringIO(content))

    def test_header_of_a_newer_kvtune_is_refused(self, store):
        header = '{"kind":"kvtune-export","schema_version":2,"kvtune_version":"9.0"}\n'
        with pytest.raises(BadInput, match=r"line 1: .*newer kvtune") as caught:
            store.import_(io.StringIO(header))
        assert "pip install -U kvtune" in caught.value.fix
