"""Checks what a backend computed in a timed case against the fp64 reference of the tests."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.core.metrics import Pass
from benchmarks.peers.backends import Backend
from tests.cases.attention import AttentionCase, AttentionInputs
from tests.reference import AttentionResult, attention_with_gradients, low_precision
from tests.reference.tolerance import Closeness, compare

CHECKED = {Pass.forward: ("out",), Pass.backward: ("dq", "dk", "dv")}


class ReferenceCheck:
    """The reference for one case's inputs, computed once for all backends.

    Each key head and its query heads are a problem of their own, so the backend runs the whole case
    and the last key head of the last batch entry, where a wrong offset shows, is compared.
    """

    def __init__(self, case: AttentionCase, inputs: AttentionInputs) -> None:
        self.case, self.inputs = case, inputs
        self.group = case.num_heads_q // case.num_heads_k
        q, k, v, dout = (self.last_head(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        options = {"softmax_scale": case.softmax_scale, "causal": case.causal}
        self.reference = attention_with_gradients(q, k, v, dout, **options)
        self.naive = low_precision(q, k, v, dout, **options)

    def last_head(self, x: Tensor) -> Tensor:
        """(B, S, H, D) -> (1, S, heads of the last key head, D), detached."""
        count = self.group if x.shape[2] == self.case.num_heads_q else 1
        return x.detach()[-1:, :, -count:]

    def check(self, backend: Backend, which: Pass) -> dict[str, object]:
        """{"passes": ..., tensor name: its comparison, ...} for the tensors of the pass."""
        actual = self.run(backend)
        compared = {
            item.name: item
            for item in compare(actual, self.reference, self.naive)
            if item.name in CHECKED[which]
        }
        return summary(list(compared.values()))

    def run(self, backend: Backend) -> AttentionResult:
        attend = backend.prepare(self.case)
        inputs = self.inputs
        q, k, v, dout = (backend.view(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        with backend.scope(), torch.enable_grad():
            out = attend(q, k, v)
            gradients = torch.autograd.grad(out, (q, k, v), dout)
        tensors = (self.last_head(backend.view(x)) for x in (out, *gradients))
        out, dq, dk, dv = tensors
        # The backends have no common way to return the lse; the tests compare that of ours.
        return AttentionResult(out=out, lse=self.reference.lse, dq=dq, dk=dk, dv=dv)


def summary(compared: list[Closeness]) -> dict[str, object]:
    verdict: dict[str, object] = {"passes": all(item.passes for item in compared)}
    return verdict | {item.name: item.as_dict() for item in compared}
