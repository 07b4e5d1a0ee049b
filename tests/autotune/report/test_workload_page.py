"""What a workload's page holds."""

from contracts.pages import fingerprint, lengths, parsed, workload

from kvtune.autotune.report.workload_page import workload_page
from kvtune.profilers.arrivals import Arrivals


def test_figures_hold_the_numbers_of_the_workload():
    plots = parsed(workload_page(workload())).plots
    (prompts,) = plots["Lengths of prompts."]["data"]
    assert prompts["x"] == ["32 to 64", "64 to 128"]
    assert prompts["y"] == [150, 50]
    (arrivals,) = plots["Arrivals, in the file."]["data"]
    assert arrivals["x"] == [0.25, 0.75, 1.25], "the middles of the bins"
    assert arrivals["y"] == [2, 0, 8]
    assert arrivals["width"] == 0.5
    (reuse,) = plots["Prefixes that come again."]["data"]
    assert reuse["y"] == [0.8, 0.5]


def test_the_same_numbers_stand_in_tables_for_who_sees_no_figures():
    found = parsed(workload_page(workload()))
    assert ["prompt", "50", "48", "99", "-", "32 to 64"] in found.rows
    assert ["128", "50%"] in found.rows
    assert "4" in found.texts["dd"]
    assert found.texts["p"][0].startswith("200 requests over 50 s: 4 a second, burstiness 1.5")


def test_lengths_of_one_token_are_one_number():
    one = workload(prompts=lengths(0, 1, 2, counts=(3, 4)))
    (bars,) = parsed(workload_page(one)).plots["Lengths of prompts."]["data"]
    assert bars["x"] == ["0", "1"]


def test_an_estimate_is_called_one():
    found = parsed(workload_page(workload(fingerprint=fingerprint(sampled=True))))
    assert "Prompt tokens that come again, estimated from a sample" in found.texts["caption"]


def test_what_is_not_in_the_file_is_named():
    bare = fingerprint(input_tokens=None, output_tokens=None, reusable_prefix_share={})
    found = parsed(workload_page(workload(fingerprint=bare, arrivals=None)))
    assert found.of("figure") == []
    assert found.texts["h2"][-1] == "Not known"
    assert len([text for text in found.texts["li"] if ": " in text]) == 4


def test_many_bins_fill_the_width_and_few_do_not():
    wide = workload(prompts=lengths(*range(13), counts=(1,) * 12), arrivals=Arrivals(1.0, (1, 1)))
    plots = parsed(workload_page(wide)).plots
    assert plots["Lengths of prompts."]["layout"]["bargap"] == 0.08
    assert plots["Lengths of outputs."]["layout"]["bargap"] > 0.8
