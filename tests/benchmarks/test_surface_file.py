"""What a recorded surface keeps of a run, and that nothing of it is lost on the way."""

from dataclasses import replace

import pytest
from contracts.surfaces_made import header
from hypothesis import given
from hypothesis import strategies as st
from surface_file import (
    TICK_S,
    Line,
    append,
    differences,
    effective_of,
    gap_codes,
    gaps_of,
    pack,
    pack_requests,
    read_recording,
    run_of,
)

from kvtune.errors import BadInput
from kvtune.types import EffectiveConfig, RequestRecord

GAPS = st.lists(st.floats(0, 30), max_size=40)


def record(**changes):
    plain = RequestRecord(
        index=3,
        scheduled_s=1.25,
        sent_s=1.25,
        first_token_s=2.0,
        end_s=2.3015,
        gaps_s=(0.1, 0.0, 0.2),
        input_tokens=640,
        output_tokens=4,
        requested_output_tokens=4,
        cached_tokens=512,
    )
    return replace(plain, **changes)


def line(n=0, **changes):
    fields = {
        "n": n,
        "kind": "point",
        "point": (128, 128),
        "session": 0,
        "at_s": 1.0,
        "others_cores_before": 0.0,
        "load_s": 4.0,
        "wall_s": 9.0,
        "requests": pack_requests([record()]),
        **changes,
    }
    return Line(**fields)


@given(GAPS)
def test_a_gap_is_kept_to_a_hundredth(gaps_s):
    for kept_s, real_s in zip(gaps_of(gap_codes(gaps_s)), gaps_s, strict=True):
        assert kept_s == pytest.approx(real_s, rel=0.01, abs=5e-5)


def test_tokens_of_one_message_stay_together():
    assert gaps_of(gap_codes([0.0, 0.0])) == (0.0, 0.0)


@given(
    sent_s=st.floats(0, 100),
    first_s=st.one_of(st.none(), st.floats(0, 50)),
    gaps_s=GAPS,
    after_s=st.floats(0, 1),
    cached=st.one_of(st.none(), st.integers(0, 4096)),
)
def test_a_request_comes_back_as_it_was(sent_s, first_s, gaps_s, after_s, cached):
    first = None if first_s is None else sent_s + first_s
    gaps = () if first is None else tuple(gaps_s)
    end_s = (sent_s if first is None else first + sum(gaps)) + after_s
    given_one = record(
        sent_s=sent_s,
        scheduled_s=sent_s,
        first_token_s=first,
        gaps_s=gaps,
        end_s=end_s,
        cached_tokens=cached,
        error=None if first is not None else "timeout: 300 s",
    )
    [kept] = run_of(line(requests=pack_requests([given_one]))).records
    assert kept.sent_s == pytest.approx(sent_s, abs=TICK_S)
    assert kept.end_s == pytest.approx(end_s, abs=TICK_S)
    assert (kept.first_token_s is None) == (first is None)
    if first is not None:
        assert kept.first_token_s - kept.sent_s == pytest.approx(first_s, abs=TICK_S)
    assert len(kept.gaps_s) == len(gaps)
    for name in ("index", "input_tokens", "output_tokens", "cached_tokens", "error", "ok"):
        assert getattr(kept, name) == getattr(given_one, name)


def test_no_text_is_kept():
    assert "secret" not in repr(pack_requests([record(text="secret")]))


def test_a_line_that_was_cut_off_is_left_out_and_written_over(tmp_path):
    path = tmp_path / "s.jsonl"
    append(path, header())
    append(path, line(0))
    with path.open("ab") as file:
        file.write(b'{"n": 1, "kind": "po')
    assert [one.n for one in read_recording(path).lines] == [0]
    append(path, line(1))
    assert [one.n for one in read_recording(path).lines] == [0, 1]


def test_a_packed_recording_reads_the_same(tmp_path):
    path = tmp_path / "s.jsonl"
    append(path, header())
    append(path, line(0, load_s=None, requests=(), failure={"failure": "unknown", "message": "m"}))
    append(path, line(1))
    assert read_recording(pack(path)) == read_recording(path)


def test_a_file_that_is_no_recording_is_refused(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text('{"requests": 1}\n')
    with pytest.raises(BadInput, match="no recorded surface"):
        read_recording(path)


def test_a_failed_measurement_has_no_run():
    failed = line(load_s=None, requests=(), failure={"failure": "does-not-fit", "message": "m"})
    with pytest.raises(ValueError, match="no run"):
        run_of(failed)


def test_an_effective_configuration_is_kept_as_what_differs_from_stock():
    made = header()
    other = made.effective.model_copy(update={"num_gpu_blocks": 68, "block_size_tokens": 32})
    kept = differences(other, made.effective)
    assert kept == {"num_gpu_blocks": 68, "block_size_tokens": 32}
    assert effective_of(line(effective=kept), made) == other
    assert isinstance(effective_of(line(), made), EffectiveConfig)
