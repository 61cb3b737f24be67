"""Penalty counts on a server that decodes: kept by row, rebuilt after a retraction, with SGLang's own penalizers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

VOCABULARY = 12


class Batch(SimpleNamespace):
    """SGLang batch with the fields that penalizers read."""


def request(prompt: list[int], answer: list[int], **penalties: float) -> Any:
    defaults = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    return SimpleNamespace(
        origin_input_ids=prompt,
        output_ids=answer,
        decode_batch_idx=0,
        sampling_params=SimpleNamespace(stop_token_ids=None, **{**defaults, **penalties}),
        eos_token_ids={1},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=1),
    )


def batch(*reqs: Any, overlap: bool, drafts: str | None = None) -> Any:
    """Return a prefill batch of these requests with new penalizers. `drafts`: speculative algorithm."""
    from sglang.srt.sampling import penaltylib as lib
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    made = Batch(reqs=list(reqs), device="cpu", enable_overlap=overlap, decoding_reqs=None)
    made.model_config = SimpleNamespace(laps_colocated=True)
    made.spec_algorithm = SpeculativeAlgorithm.from_string(drafts)
    kinds = {lib.BatchedFrequencyPenalizer, lib.BatchedPresencePenalizer, lib.BatchedMinNewTokensPenalizer}
    found = lib.BatchedPenalizerOrchestrator(VOCABULARY, made, {*kinds, lib.BatchedRepetitionPenalizer})
    made.sampling_info = SimpleNamespace(penalizer_orchestrator=found)
    return made


def logits(made: Any) -> torch.Tensor:
    """Return fixed logits after the penalties."""
    found = torch.linspace(-1.0, 2.0, VOCABULARY).repeat(len(made.reqs), 1)
    orchestrator = made.sampling_info.penalizer_orchestrator
    orchestrator.accumulate_additive_penalties(found)
    scale = orchestrator.accumulate_scaling_penalties()
    return found if scale is None else torch.where(found < 0, found * scale, found / scale)


ANSWER = [3, 5, 3, 7]
PENALTIES = [
    {"frequency_penalty": 0.5, "min_new_tokens": 6},
    {"presence_penalty": 0.7, "min_new_tokens": 3},
    {"repetition_penalty": 1.4},
]


@pytest.mark.parametrize("overlap", [False, True])
def test_retracted_request_gets_same_penalty_counts(overlap: bool) -> None:
    """Compared with a request that is decoded alone, step by step, where each step counts one token."""
    from sglang_laps import penalties

    for wanted in PENALTIES:
        alone = batch(req := request([2, 9], [], **wanted), overlap=overlap)
        for i, token in enumerate(ANSWER):
            req.output_ids = [*ANSWER[:i], token]
            alone.seq_lens_cpu = torch.tensor([2 + i])
            penalties.count(lambda _: None, alone)
        # Placed between a new request and a request with other penalties.
        together = batch(
            request([4], [], frequency_penalty=1.0),
            request([2, 9], ANSWER, **wanted),
            request([4, 6], [8], presence_penalty=0.2),
            overlap=overlap,
        )
        new = logits(together)[0]
        penalties.recount(together)
        torch.testing.assert_close(logits(together)[1], logits(alone)[0])
        torch.testing.assert_close(logits(together)[0], new)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_last_token_of_each_draft_step_is_counted(overlap: bool, at_once: bool) -> None:
    """In the overlap loop the step before the last counts, even if (`at_once`) the last step's result is known."""
    from sglang_laps import penalties

    made = batch(req := request([2, 9], [], frequency_penalty=0.5), overlap=overlap, drafts="EAGLE")
    counted: list[int] = []
    orchestrator = made.sampling_info.penalizer_orchestrator
    orchestrator.cumulate_output_tokens = lambda tokens: counted.extend(tokens.tolist())
    ends = [1, 3, 4, 6]
    """Numbers of answered tokens after the prompt and after each step."""
    for step in range(4):
        processed = step if at_once or not overlap else step - 1
        req.output_ids = [10, 11, 12, 13, 14, 15][: ends[processed] if processed >= 0 else 0]
        known = ends[max(0, step - 1) if overlap else step]
        made.seq_lens_cpu = torch.tensor([2 + known - 1])
        penalties.count(lambda _: None, made)
        req.decode_batch_idx += 1
    assert counted == ([9, 10, 12, 13] if overlap else [10, 12, 13, 15])


def test_rows_of_beams_after_requests_are_not_counted() -> None:
    from sglang_laps import penalties

    made = batch(request([2, 9], [5], frequency_penalty=0.5), request([4, 6], [0]), overlap=False)
    made.seq_lens_cpu = torch.tensor([2, 2, 2, 2])  # the second request has two more beams
    before = logits(made)
    penalties.count(lambda _: None, made)
    assert (logits(made) - before).nonzero().tolist() == [[0, 5]]


def test_recount_without_penalties_changes_no_logits() -> None:
    from sglang_laps import penalties

    made = batch(request([2, 9], ANSWER), overlap=True)
    before = logits(made)
    penalties.recount(made)
    torch.testing.assert_close(logits(made), before)
