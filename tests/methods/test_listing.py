"""The lists of methods and metrics: one plain sentence each, and a group for every method."""

from __future__ import annotations

import re

import pytest

import patchlight as pl
from patchlight.core.registry import Entry
from patchlight.methods.base import GROUPS, METHODS
from patchlight.metrics.base import METRICS


@pytest.mark.parametrize("entry", [*METHODS.values(), *METRICS.values()], ids=lambda entry: entry.name)
def test_a_docstring_begins_with_one_plain_sentence(entry: Entry) -> None:
    assert entry.summary.endswith(".")
    assert ". " not in entry.summary, "one sentence"
    formula = re.search(r"[=_|^{}<>*]|\w\(|sum of |prod", re.sub(r"`[^`]*`", "", entry.summary))
    assert formula is None, f"{formula} belongs in a block of its own below the first sentence"


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"random"}))
def test_a_method_that_ignores_the_class_says_so(name: str) -> None:
    assert METHODS[name].summary.endswith("; ignores the class.") == METHODS[name].ignores_class


def test_every_method_is_listed_in_a_group() -> None:
    groups = {info.name: info.group for info in pl.list_methods()}
    assert set(groups.values()) == set(GROUPS) - {"other"}
    expected = {"genatt": "attention", "ixg": "gradients", "decompx": "decomposition", "lrp": "decomposition"}
    expected |= {"gradcam": "CAM", "tis": "perturbation", "kernel-shap": "Shapley", "diffmask": "trained"}
    assert groups | expected | {"random": "baseline"} == groups
