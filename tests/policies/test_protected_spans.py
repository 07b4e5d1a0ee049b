"""What requests may mark, and how much of each kind of span is kept, against counting tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import BadInput
from kvtune.policies.protected_spans import MOST_SPANS, kept_by_kind, protected_spans


def marked(spans):
    return {"kvtune": {"protected_spans": spans}, "do_remote_decode": False}


def test_spans_are_read_from_our_section():
    assert protected_spans(marked([[0, 240], [512, 600]]), 600) == ((0, 240), (512, 600))
    assert protected_spans(marked([]), 600) == ()
    assert protected_spans({"kvtune": {}}, 600) == ()


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, "text"])
def test_a_request_of_others_says_nothing(params):
    assert protected_spans(params, 600) is None


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"protected_spans": [[0, 601]]}, r"\[0, 601\) is not within the prompt, which has 600"),
        ({"protected_spans": [[5, 5]]}, r"\[5, 5\) is not within"),
        ({"protected_spans": [[1, 2], [-1, 5]]}, "kvtune.protected_spans.1 is no pair of places"),
        ({"protected_spans": [[0, 2.0]]}, "no pair"),
        ({"protected_spans": [[0, True]]}, "no pair"),
        ({"protected_spans": [["0", "2"]]}, "no pair"),
        ({"protected_spans": [[0, None]]}, "no pair"),
        ({"protected_spans": [[1, 2, 3]]}, "no pair"),
        ({"protected_spans": [[[1, 2]]]}, "no pair"),
        ({"protected_spans": ["12", {"1": 2}]}, "kvtune.protected_spans.0 is no pair"),
        ({"protected_spans": [[0, 10**5000]]}, "no pair"),
        ({"protected_spans": [[1, 2]] * (MOST_SPANS + 1)}, f"at most {MOST_SPANS} spans"),
        ({"protected_spans": None}, "takes a list"),
        ({"protected_spans": {"0": 1}}, "takes a list"),
        ({"protect": [[1, 2]]}, "kvtune takes an object with protected_spans and nothing else"),
        ({"protected_spans": [], 3: 4}, "nothing else"),
        (None, "takes an object"),
        (True, "takes an object"),
        ([[1, 2]], "takes an object"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_way_to_say_it(section, why):
    with pytest.raises(BadInput, match=why) as caught:
        protected_spans({"kvtune": section}, 600)
    assert '{"protected_spans": [[start, end], ...]}' in caught.value.fix


@pytest.mark.parametrize(
    "section",
    [
        {"protected_spans": ["x"] * 10**6},
        {"protected_spans": [["x"] * 10**6] * MOST_SPANS},
        {"k" * 10**6: 1},
        dict.fromkeys(range(10**5)),
    ],
)
def test_however_much_is_wrong_the_answer_is_short(section):
    with pytest.raises(BadInput) as caught:
        protected_spans({"kvtune": section}, 600)
    assert len(caught.value.message) < 200


@given(
    st.integers(1, 60),
    st.integers(0, 70),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=4),
    st.sets(st.integers(0, 14)),
)
def test_each_token_counts_once(prompt, prefix, spans, pages):
    marked = [(start, start + length) for start, length in spans]
    gone = [(page * 5, page * 5 + 5) for page in sorted(pages)]
    expected = {"prefix": [0, 0], "marked": [0, 0], "rest": [0, 0]}
    for token in range(prompt):
        is_marked = any(start <= token < end for start, end in marked)
        kind = "prefix" if token < prefix else "marked" if is_marked else "rest"
        expected[kind][0] += 1
        expected[kind][1] += token // 5 not in pages
    told = kept_by_kind(prompt, prefix, marked, gone)
    assert {kind: list(counts) for kind, counts in told.items()} == expected
