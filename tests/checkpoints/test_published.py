"""The table of public drafters, and the page that is made of it, say what the tests of their packagings show."""

import importlib
from collections import Counter

import pytest
from documents import ROOT
from replicas import REPLICAS
from transformers import CONFIG_MAPPING
from transformers.configuration_utils import ALLOWED_LAYER_TYPES


@pytest.fixture(scope="module")
def drafters():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        yield importlib.import_module("drafters")


@pytest.fixture(scope="module")
def rows(drafters):
    return drafters.rows()


def test_every_drafter_is_listed_once(rows):
    assert len(rows) == 164
    assert not [name for name, count in Counter(row["drafter"] for row in rows).items() if count > 1]


def test_every_row_has_the_state_that_its_replica_shows(rows, drafters):
    """`tests/checkpoints/test_replicas.py` reads and drafts with those that have no refusal, and sees the others refused."""
    for row in rows:
        replica = REPLICAS[row["packaging"]]
        assert row["state"] in drafters.STATES, row
        assert (replica.refusal is None) == (row["state"] in ("usable", "no target")), row
        assert (row["packaging"] == "EAGLE-3, pickle") == (row["state"] == "pickle"), row
        assert bool(row["note"]) == (row["state"] != "usable"), row


def test_every_replica_stands_for_a_drafter(rows):
    assert {row["packaging"] for row in rows} == set(REPLICAS)


def test_transformers_has_the_target_of_every_usable_drafter(rows):
    if "indexed_attention" not in ALLOWED_LAYER_TYPES:
        pytest.skip("the table is of a newer transformers")
    for row in rows:
        if row["state"] in ("usable", "pickle"):
            assert row["target_class"] in CONFIG_MAPPING, row
        if row["state"] == "no target":
            assert not row["target_class"], row


def test_the_count(rows):
    states = Counter(row["state"] for row in rows)
    assert states["usable"] >= 130
    assert sum(row["before"] == "usable" for row in rows) == 51
    assert not [row for row in rows if row["before"] == "usable" and row["state"] != "usable"]


def test_the_page_is_made_of_the_table(drafters):
    assert drafters.PAGE.read_text(encoding="utf-8") == drafters.page(), "run `python docs/drafters.py`"
