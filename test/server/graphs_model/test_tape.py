"""The tape that stands in for CUDA graphs: what it plays again, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graph_tape import NotCapturable, Tape


def record_tape(body: Callable[[], torch.Tensor]) -> tuple[Tape, torch.Tensor]:
    """Return a tape of ``body``, and the static tensor that its replays write."""
    place = torch.zeros_like(body())
    tape = Tape()
    with torch.no_grad(), tape.recording():
        place.copy_(body())
    return tape, place


def test_replay_reads_current_values_of_static_tensors() -> None:
    x, w = torch.arange(6.0), torch.eye(6)
    tape, out = record_tape(lambda: (x[2:].clone().mul_(2.0) @ w[2:]).relu())
    x.copy_(torch.arange(6.0) + 1.0)
    tape.replay()
    assert out.tolist() == [0, 0, 6, 8, 10, 12]
    w.zero_()
    tape.replay()
    assert not out.any()


def test_replay_runs_no_python() -> None:
    calls: list[int] = []
    x = torch.ones(3)

    def capture() -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    tape, _ = record_tape(capture)
    before = len(calls)
    tape.replay()
    assert len(calls) == before


def test_replay_keeps_python_values_of_capture() -> None:
    lens, x = [2], torch.arange(4.0)
    tape, out = record_tape(lambda: x[: lens[0]] + 1)
    lens[0] = 4
    tape.replay()
    assert out.tolist() == [1, 2]


def test_uninitialized_memory_becomes_nan() -> None:
    tape, out = record_tape(lambda: torch.empty(3).add_(1.0))
    tape.replay()
    assert out.isnan().all()


REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "item": (lambda x: x[0].item(), "reads values"),
    "int": (lambda x: int(x[0]), "reads values"),
    "bool": (lambda x: 1 if x[0] > 0 else 2, "reads values"),
    "a slice up to a tensor": (lambda x: x[: x[1].long()], "reads values"),
    "tolist": (lambda x: x.tolist(), "reads values"),
    "cpu": (lambda x: x.cpu(), "reads values"),
    "numpy": (lambda x: x.numpy(), "reads values"),
    "nonzero": (lambda x: x.nonzero(), "depends on values"),
    "a mask": (lambda x: x[x > 1], "depends on values"),
    "masked_select": (lambda x: x.masked_select(x > 1), "depends on values"),
    "unique": (lambda x: x.unique(), "depends on values"),
    "repeats from a tensor": (lambda x: torch.repeat_interleave(x, x.long()), "depends on values"),
    "a list": (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), "copies from the host"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_uncapturable_operation_is_refused(what: str) -> None:
    body, why = REFUSED[what]
    x = torch.arange(3.0)
    with pytest.raises(NotCapturable, match=why), torch.no_grad(), Tape().recording():
        body(x)
