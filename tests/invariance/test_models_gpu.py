"""`samebits.invariance` names the module where a real model's rows depend on the batch, and none once it is patched."""

import pytest

import samebits
from samebits.models.deepseek_v4.subject import SMALL, causal_lm
from samebits.models.minimax_h3 import subject

pytestmark = pytest.mark.gpu


def minimax_h3():
    """One block of the released width, four sequences of the layout ``tiny``."""
    made = subject.subject("tiny", batch=4, device="cuda", **subject.RELEASED, num_layers=1)
    return made.model, made.inputs, [name for name in made.inputs if name not in (*subject.PER_ROW, "return_dict")]


def broken(model, inputs, shared=()):
    """What each change of the batch found, where that is not that every row keeps its bits."""
    return [found for found in samebits.invariance(model, inputs, shared=shared).findings if found.status != "pass"]


def test_minimax_h3():
    model, inputs, shared = minimax_h3()
    assert {found.status for found in broken(model, inputs, shared)} == {"fail"}
    samebits.patch(model)
    assert not broken(model, inputs, shared)


def test_deepseek_v4():
    """What is patched keeps its rows; the products of attention, router and experts stay the library's."""
    made = causal_lm(batch=16, sequence=1, device="cuda", config=SMALL)
    samebits.patch(made.model, contracts="published")
    found = broken(made.model, {"input_ids": made.ids, "use_cache": False})
    sites = {site for site, count in samebits.patched(made.model).hits.items() if count}
    assert sites and not sites & {one.first.event.path for one in found if one.first is not None}
