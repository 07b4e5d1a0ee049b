"""`kvtune policies`: the catalogue as a table, as JSON and as a page."""


def test_the_table_says_what_is_no_policy_too(kvtune):
    said = kvtune("policies").out
    assert "snapkv" in said
    assert "block_size" in said
    assert "FlashAttention" in said


def test_json_can_be_filtered(kvtune):
    found = kvtune("policies", "--axis", "bits", "--json").json()
    assert {"kivi", "turboquant"} <= {entry["name"] for entry in found}
    assert {entry["axis"] for entry in found} == {"bits"}
    levers = kvtune("policies", "--kind", "lever", "--json").json()
    assert {entry["kind"] for entry in levers} == {"lever"}


def test_markdown_is_a_table(kvtune):
    said = kvtune("policies", "--markdown").out
    assert said.startswith("# Policies\n")
    assert "| `snapkv` |" in said


def test_an_unknown_axis_names_the_known_ones(kvtune):
    said = kvtune("policies", "--axis", "colour", code=2).err
    assert "selection" in said
