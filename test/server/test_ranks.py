"""The leading rank, and how its plan reaches the other tensor, context and pipeline ranks; all ranks in one process."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import cores
import pytest
from laps_core.length import LONG, SHORT
from laps_core.policy.decode import Decode
from laps_core.policy.types import Account, LongBatch, Plan

from .fields import Request, SchedulerFields

PLAN = Plan((SHORT, LONG), (2, 0), LongBatch((1,), 512), threshold=256, account=Account("idle"))
HEARD = Plan.of(PLAN.numbers())
"""Plan as received by other ranks, without the statistics of the leading rank."""


class Group:
    """Group whose ranks broadcast one after the other, in order; all get the tensor of the first rank."""

    def __init__(self) -> None:
        self.said: Any = None


class World:
    """Ranks of one scheduler, which run in turn: cp x tp ranks in each of pp stages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, tp: int = 1, cp: int = 1, pp: int = 1) -> None:
        import sglang_laps.ranks as module
        import torch

        def broadcast(box: Any, src: Group, group: Group) -> None:
            assert src is group
            if group.said is None:
                group.said = box.clone()
            box.copy_(group.said)

        monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
        monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, first: group)
        across, along = [Group() for _ in range(tp)], [Group() for _ in range(cp)]
        self.ranks: dict[tuple[int, int, int], Any] = {}
        for stage in range(pp):
            for c in range(cp):
                for t in range(tp):
                    parallel = SimpleNamespace(
                        attn_tp_rank=t, attn_tp_size=tp, attn_cp_rank=c, attn_cp_size=cp, attn_dp_rank=0, dp_rank=None,
                        pp_rank=stage, pp_size=pp, cp_strategy="zigzag", enable_prefill_cp=cp > 1,
                    )  # fmt: skip
                    monkeypatch.setattr(module, "get_parallel", lambda parallel=parallel: parallel)
                    self.ranks[stage, c, t] = module.Ranks(across[t], along[c])


def test_single_rank_keeps_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    (me,) = World(monkeypatch).ranks.values()
    received: list[Any] = []
    me.keep_received(received)
    assert me.leader
    assert me.saves
    assert me.agree(PLAN) is PLAN
    assert received == []
    assert me.take_plan(received) is received


def test_plan_reaches_cp_ranks_then_tp_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, tp=2, cp=2)
    (leader,) = (at for at, r in world.ranks.items() if r.leader)
    assert leader == (0, 0, 0)
    # In this order the first rank of each group knows the plan before the group's other ranks ask.
    plans = {at: r.agree(PLAN if r.leader else Plan(())) for at, r in sorted(world.ranks.items())}
    assert plans.pop(leader) is PLAN
    assert list(plans.values()) == [HEARD] * 3


def test_min_divisible_tokens_is_set_only_with_context_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World(monkeypatch, cp=4).ranks[0, 0, 0].min_divisible_tokens == 8
    assert World(monkeypatch, tp=4).ranks[0, 0, 0].min_divisible_tokens == 0


def test_plan_of_first_stage_is_forwarded_with_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, pp=3)
    first, *later = world.ranks.values()
    assert [r.leader for r in (first, *later)] == [r.saves for r in (first, *later)] == [True, False, False]
    for requests in (["a", "b"], [], ["c"]):
        sent: list[Any] = list(requests)
        first.keep_received(sent)
        assert first.take_plan(sent) == requests
        assert first.agree(PLAN) is PLAN
        for stage in later:
            received = pickle.loads(pickle.dumps(sent))
            stage.keep_received(received)
            assert stage.take_plan(received) == requests
            assert stage.agree(Plan(())) == PLAN
            assert received == sent, "the next stage is sent all of it"


def test_leading_plan_reaches_all_tp_ranks_of_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, pp=3, tp=2)
    assert [at for at, r in world.ranks.items() if r.leader] == [(0, 0, 0)]
    lists: dict[int, list[Any]] = {}
    for tp in range(2):
        sent: list[Any] = ["a"]
        rank = world.ranks[0, 0, tp]
        rank.keep_received(sent)
        assert rank.take_plan(sent) == ["a"]
        assert rank.agree(PLAN if rank.leader else Plan(())) == (PLAN if rank.leader else HEARD)
        lists[tp] = sent
    for stage in (1, 2):
        # The first rank of a stage receives the list, and SGLang broadcasts it to the stage's other ranks.
        for tp in range(2):
            received = pickle.loads(pickle.dumps(lists[0]))
            rank = world.ranks[stage, 0, tp]
            rank.keep_received(received)
            assert rank.take_plan(received) == ["a"]
            assert rank.agree(Plan(())) == PLAN
            assert received == lists[0], "the next stage is sent all of it"


def test_stages_with_different_work_raise_instead_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = World(monkeypatch, pp=2).ranks[1, 0, 0]
    stage.take_plan(["a"])
    with pytest.raises(RuntimeError, match="the first one has none"):
        stage.agree(Plan(()))
    stage.take_plan([PLAN])
    stage.take_plan([])
    with pytest.raises(RuntimeError, match="this one had no work"):
        stage.take_plan([PLAN])


def test_waiting_grammars_are_looked_at_once_in_each_round() -> None:
    """In a second look, the first of two pipeline stages would wait for the other stage forever."""
    seen: list[list[Any]] = []

    def stock(running: Any) -> Any:
        seen.append(scheduler.grammar_manager.grammar_queue)
        return SimpleNamespace(running_batch=running, batch_to_run=None)

    scheduler: Any = SchedulerFields([Request("s", 30), Request("L", 3000)], stock=stock)
    scheduler.laps.core.decide = lambda *_, **__: Plan((SHORT, LONG), picked=(0,), long=LongBatch((0,)))
    waits = SimpleNamespace(grammar_wait_ct=0)
    scheduler.disagg_prefill_inflight_queue, scheduler.grammar_manager.grammar_queue = [], [waits]
    for _ in range(2):
        scheduler.laps.builder.build(None)
    assert seen == [[]] * 4
    assert scheduler.grammar_manager.grammar_queue == [waits]
    assert waits.grammar_wait_ct == 2


@pytest.mark.parametrize("prefills", [False, True])
def test_decode_step_is_beside_prefill_if_a_rank_prefills(prefills: bool) -> None:
    """A plan of all ranks can end up without prefill: the ranks lack memory for it."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang_laps.steps import Steps

    core, alone = cores.make_core(decode=Decode(50.0)), list[Any]()
    started: list[bool] = []
    group: Any = SimpleNamespace(start_step=lambda *, prefills: started.append(prefills))
    steps = Steps(core, None, alone.append, group)
    mode = ForwardMode.DECODE
    batch = SimpleNamespace(reqs=[Request("r")], forward_mode=mode, forward_iter=1, is_extend_in_batch=prefills)
    with steps.running(batch):
        pass
    steps.record_result(batch, None)
    assert core.decode is not None
    assert (len(alone), core.decode.status()["steps"], started) == (0 if prefills else 1, 1, [prefills])


@pytest.mark.parametrize("prefills", [False, True])
def test_idle_rank_starts_joint_step_only_if_a_rank_prefills(prefills: bool) -> None:
    from sglang_laps.pauses import Pauses

    started: list[bool] = []
    pauses: Any = Pauses.__new__(Pauses)
    pauses._group, pauses._cutter = SimpleNamespace(start_step=lambda *, prefills: started.append(prefills)), None
    batch = SimpleNamespace(is_extend_in_batch=prefills)
    with pauses.slicing(SimpleNamespace(reqs=[], batch=batch, layers=0)):
        pass
    assert started == [prefills]
