import json
import os
import re
import stat
import tomllib
from pathlib import Path

import pytest
from contracts.pages import Parsed

from kvtune.autotune.report.page import (
    Bullets,
    Column,
    Details,
    Excerpt,
    Figure,
    KeyFigure,
    KeyFigures,
    Page,
    Row,
    Section,
    Table,
    check_path,
    plain,
    render_page,
    write_page,
)
from kvtune.errors import BadInput

EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"


def plot(name: str = "a") -> Figure:
    data = {"data": [{"type": "bar", "x": [name], "y": [1]}], "layout": {"bargap": 0.1}}
    return Figure("Lengths.", f"Bars of {name}.", data)


def page(*blocks, title: str = "A page", heading: str = "What was seen") -> Page:
    return Page(title, "and its subtitle", (Section(heading, blocks),))


def test_each_kind_of_block_is_on_the_page():
    table = Table(
        "Levers",
        (Column("lever"), Column("gain", is_number=True)),
        (Row(("fp8", "+14%"), "good"), Row(("int4", "-3%"), "bad")),
    )
    details = Details("One answer", (Excerpt("stock", "yes\n  no"), Excerpt("fp8", "yes")))
    key = KeyFigures((KeyFigure("goodput", "1.4 requests/s", "was 1.2", "good"),))
    found = Parsed(render_page(page("A paragraph.", Bullets(("one", "two")), table, details, key)))
    assert "A paragraph." in found.texts["p"]
    assert found.texts["caption"] == ["Levers"]
    assert found.of("tr")[1:] == [{"class": "good"}, {"class": "bad"}]
    assert found.of("td") == [{"class": "number"}] * 2
    assert found.texts["td"] == ["+14%", "-3%"]
    assert [cell["scope"] for cell in found.of("th")] == ["col", "col", "row", "row"]
    assert found.texts["pre"] == ["yes\n  no", "yes"]
    assert found.texts["dd"] == ["1.4 requests/s", "was 1.2"]
    assert {"one", "two"} <= set(found.texts["li"])


def test_nothing_that_a_user_or_a_model_wrote_becomes_markup():
    column = Column(EVIL)
    found = Parsed(
        render_page(
            Page(
                EVIL,
                EVIL,
                (
                    Section(EVIL, (EVIL, Bullets((EVIL,)))),
                    Section(
                        "Rest",
                        (
                            KeyFigures((KeyFigure(EVIL, EVIL, EVIL),)),
                            Table(EVIL, (column,), (Row((EVIL,)),)),
                            Details(EVIL, (Excerpt(EVIL, EVIL),)),
                            Figure(EVIL, EVIL, {"data": [{"x": [EVIL]}], "layout": {"a": EVIL}}),
                        ),
                    ),
                ),
            )
        )
    )
    assert found.of("img") == []
    # The figure's numbers, plotly.js and the page's own script: none is the user's.
    assert [attributes.get("type") for attributes in found.of("script")] == [
        "application/json",
        None,
        None,
    ]
    assert json.loads(found.texts["script"][0])["data"][0]["x"] == [EVIL]
    for tag in ("title", "h1", "h2", "p", "caption", "td", "summary", "pre", "dt"):
        assert EVIL in found.texts.get(tag, [EVIL])


def test_a_label_of_a_figure_shows_markup_instead_of_obeying_it():
    assert plain("<b>R&D</b>") == "&lt;b&gt;R&amp;D&lt;/b&gt;"


def test_plotly_is_embedded_once_for_all_figures_and_not_without_one():
    marker = "plotly.js v"
    assert render_page(page(plot("a"), plot("b"))).count(marker) == 1
    assert marker not in render_page(page("Only words."))


def test_a_page_may_load_nothing_and_asks_for_nothing():
    found = Parsed(render_page(page(plot())))
    policy = next(meta["content"] for meta in found.of("meta") if "http-equiv" in meta)
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert not [a for _, a in found.elements if {"src", "srcset", "data"} & set(a)]
    assert found.of("link") == []
    assert all(link["href"].startswith("#") for link in found.of("a"))


def test_contents_lead_to_each_section_even_if_headings_repeat():
    sections = tuple(Section(name, ()) for name in ("Levers", "Levers", "levers 2", "¿?"))
    found = Parsed(render_page(Page("t", "", (*sections, Section("Other", (), "mine")))))
    anchors = [section["id"] for section in found.of("section")]
    assert len(set(anchors)) == 5
    assert anchors[-1] == "mine"
    assert [link["href"] for link in found.of("a")] == [f"#{anchor}" for anchor in anchors]


def test_a_figure_says_in_words_what_it_shows():
    found = Parsed(render_page(page(plot("prompts"))))
    shown = [a for _, a in found.elements if a.get("role") == "img"]
    assert [a["aria-label"] for a in shown] == ["Bars of prompts."]
    assert "Bars of prompts." in found.texts["figcaption"][0]


def test_a_figure_of_plotlys_own_classes_is_taken_too():
    class Own:
        def to_json(self) -> str:
            return '{"data": [{"y": [1.5]}], "layout": {}, "frames": []}'

    assert json.loads(Figure("c", "d", Own()).json) == {"data": [{"y": [1.5]}], "layout": {}}


def test_a_number_that_is_not_finite_is_refused_before_the_browser_fails_on_it():
    with pytest.raises(ValueError, match="JSON"):
        render_page(page(Figure("c", "d", {"data": [{"y": [float("nan")]}]})))


def test_a_row_with_a_cell_too_few_is_refused():
    table = Table("Levers", (Column("a"), Column("b")), (Row(("only one",)),))
    with pytest.raises(ValueError, match=r"'Levers' has 2 columns.*1 cells"):
        render_page(page(table))


def test_the_same_page_gives_the_same_text():
    assert render_page(page(plot())) == render_page(page(plot()))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_page_replaces_an_older_one_and_leaves_nothing_beside_it(tmp_path, umask, mode):
    before = os.umask(umask)
    path = tmp_path / "made" / "on the way" / "report.html"
    try:
        write_page(page("First."), path)
        write_page(page("Second."), path)
    finally:
        os.umask(before)
    assert re.findall(r"<p>(\w+)\.</p>", path.read_text()) == ["Second"]
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("write", [lambda path: write_page(page("Text."), path), check_path])
def test_what_is_no_file_is_never_replaced_by_one(tmp_path, write):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BadInput, match="is no file"):
        write(pipe)
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["taken", "file/below.html"])
def test_a_path_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path, name):
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("")
    path = Path(tmp_path / name)
    with pytest.raises(BadInput, match=re.escape(str(path))) as caught:
        write_page(page("Text."), path)
    assert caught.value.fix
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "taken"]


def test_what_pages_are_made_of_ships_with_the_package():
    root = Path(__file__).parents[3]
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {file.name for file in (root / "autotune" / "report").glob("page.*")} - {"page.py"}
    assert set(settings["package-data"]["kvtune.autotune.report"]) == found
