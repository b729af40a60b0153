"""Members that run as a part of something else are shown to their hooks, and hooks that only look cost one call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from samebits.models import hooks
from samebits.models.sites import Site
from samebits.verify.trace import trace


class Counted(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Whole(nn.Module):
    """Runs its member as a part of its own operation."""

    def __init__(self):
        super().__init__()
        self.member = Counted(3, 2)

    def forward(self, x):
        hooks.show(self.member, "member", lambda: x)
        return x * 2


def looks(module, args, output=None):
    return None


def test_a_hook_that_says_that_it_looks_costs_one_call(monkeypatch):
    whole, x = Whole(), torch.ones(4, 3)
    whole(x)
    assert whole.member.calls == 0
    handle = whole.member.register_forward_hook(looks)
    whole(x)
    assert whole.member.calls == 2, "taken at nobody's word: compared"
    monkeypatch.setattr(looks, "samebits_only_looks", True, raising=False)
    whole(x)
    assert whole.member.calls == 2 + 1
    whole.member.register_forward_pre_hook(lambda module, args: None)
    whole(x)
    assert whole.member.calls == 3 + 2, "one of two does not say it"
    handle.remove()
    whole.member.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(RuntimeError, match="member: a hook changes what this module"):
        whole(x)


def test_a_trace_only_looks():
    whole, x = Whole(), torch.ones(4, 3)
    with trace(whole) as recording:
        whole(x)
    assert whole.member.calls == 1
    assert [event.path for event in recording.trace.phase("forward") if event.kind == "module"] == ["member", "(model)"]


def test_a_hook_on_all_modules_is_compared():
    whole, x = Whole(), torch.ones(4, 3)
    handle = nn.modules.module.register_module_forward_hook(looks)
    try:
        whole(x)
    finally:
        handle.remove()
    assert whole.member.calls == 2


def test_a_trace_runs_what_is_passed_over_where_it_is_asked_to():
    whole, x = Whole(), torch.ones(4, 3)
    whole.member.samebits_sites = {"": Site("member", "linear", "kchain", None, inside=True)}
    for options, calls in (({}, 0), ({"passed_over": True}, 1), ({"modules": "member"}, 1), ({"modules": "mem*"}, 0)):
        whole.member.calls = 0
        with trace(whole, **options) as recording:
            whole(x)
        paths = [event.path for event in recording.trace.phase("forward") if event.kind == "module"]
        assert whole.member.calls == calls and paths == ["member"] * calls + ["(model)"]
        assert recording.trace.header["options"]["passed_over"] is bool(options.get("passed_over"))
