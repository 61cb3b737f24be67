"""Ranks of a data-parallel attention group: one plan from the rows of all ranks, and each rank's part in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from laps_core.config import LapsConfig
from laps_core.group.cost import GroupCost
from laps_core.latency.step import Coefficients
from laps_core.length import LONG

from .adders import Cache, adder, fill_batch, make_request

__all__ = ["adder"]
RANKS = 2
COST = GroupCost(ranks=RANKS, fixed=0.01, token=1e-4, alpha=1e-9, own_floor=0.01, expert=1e-5, expert_floor=0.02)
CHUNK = 8192


class World:
    """Ranks in threads, which exchange rows in each round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, known: GroupCost | None, page: int = 1) -> None:
        import torch
        from sglang_laps import group
        from sglang_laps.classes import Tag

        self.tag = Tag
        self._here, self._rows = threading.local(), [torch.empty(0)] * RANKS
        self._all = threading.Barrier(RANKS, timeout=120)

        def gather(out: Any, row: Any, group: Any) -> None:
            self._rows[self._here.rank] = row
            self._all.wait()
            out.copy_(torch.cat(self._rows))
            self._all.wait()

        # Emulated devices exchange rows through the same module.
        monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
        parallel = SimpleNamespace(tp_size=RANKS, attn_dp_size=RANKS, attn_tp_size=1, attn_cp_size=1)
        monkeypatch.setattr(group, "get_parallel", lambda: parallel)
        pacer = SimpleNamespace(record_arrivals=lambda *_: None, threshold_tokens=256)
        classes = SimpleNamespace(new_shorts=0)
        core: Any = SimpleNamespace(pacer=pacer, classes=classes, decode=None, page=page, unit=page, lacking=False)
        self.core = core
        monkeypatch.setattr(group, "as_waiting", self._waiting)
        self.deferred: list[list[Any]] = [[] for _ in range(RANKS)]
        """Messages that each rank has received in a pause and has not dispatched yet."""
        scheds: list[Any] = [SimpleNamespace(tp_cpu_group=None, _deferred_input_requests=d) for d in self.deferred]
        self.groups = [group.Group(sched, core, known, LapsConfig(), chunk=CHUNK) for sched in scheds]

    def _waiting(self, req: Any, *, begun: bool = False) -> Any:
        from laps_core.policy.types import Waiting

        return Waiting(req.tokens, req.history, req.laps_tag.since, None, req.tokens, begun)

    def req(self, tokens: int, history: int = 0) -> Any:
        return SimpleNamespace(tokens=tokens, history=history, laps_tag=self.tag(0.0, 0.0))

    def all(self, do: Callable[[int], Any]) -> list[Any]:
        """Run ``do`` on all ranks at the same time and return the results."""
        found: list[Any] = [None] * RANKS

        def run(rank: int) -> None:
            self._here.rank = rank
            found[rank] = do(rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return found

    def round(self, *queues: Any, now: float = 1.0) -> list[Any]:
        """Run one round with these queues and return the plans of all ranks."""
        return self.all(lambda rank: self.groups[rank].plan(now, queues[rank]))


def queues(short: list[Any] | None = None, long: list[Any] | None = None, begun: list[Any] | None = None) -> Any:
    return SimpleNamespace(short=short or [], long=[*(begun or []), *(long or [])], begun=begun or [])


def test_short_requests_join_step_and_long_work_takes_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, COST)
    mine, theirs = world.round(
        queues([world.req(50), world.req(100)], [world.req(90_000)]), queues([], [world.req(60_000), world.req(700)])
    )
    assert (mine.order, mine.picked, mine.long.picked, mine.mixed) == ((LONG,), (0, 1), (0,), True)
    assert 150 < mine.long.tokens <= CHUNK, "a piece of the long one"
    assert theirs.long.picked[0] == 1, "least work first"
    assert mine.threshold == theirs.threshold == 256


def test_rank_that_is_told_to_pause_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    world = World(monkeypatch, COST)
    waiting = [queues([world.req(50)]), queues([world.req(60)])]
    for rank in range(RANKS):
        world.deferred[rank].append(PauseGenerationReqInput())
        plans = world.round(*waiting)
        assert [plan.picked for plan in plans] == [() if i <= rank else (0,) for i in range(RANKS)]


@pytest.mark.usefixtures("adder")
@pytest.mark.parametrize("page", [1, 16, 64, 128])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("long", [0, 20_000])
def test_built_step_is_planned_step_on_pages(
    monkeypatch: pytest.MonkeyPatch, page: int, begun: bool, long: int
) -> None:
    """SGLang charges whole pages for each request."""
    from sglang_laps.adder import LapsPrefillAdder
    from sglang_laps.flights import Part

    world = World(monkeypatch, COST, page)
    classes: Any = SimpleNamespace(class_of=lambda _: LONG)
    reqs = [make_request(n) for n in (*[30] * 20, long) if n]
    shorts, longs = reqs[:20], reqs[20:]
    for req in longs if begun else ():
        req.extend_end = 6400
    for req in reqs:
        req.history = req.extend_end
        req.tokens = req.laps_tag.new_tokens = len(req.full_untruncated_fill_ids) - req.history
    plan, _ = world.round(queues(shorts, begun=longs) if begun else queues(shorts, longs), queues())
    slot, queue = (longs[0], shorts) if begun and longs else (None, reqs)
    part = Part(LONG, queue, slot, plan.long.tokens, whole=False)
    make: Any = partial(LapsPrefillAdder, classes, lambda _: None, reserve=0, limit=part.limit(page, page))
    built, _ = fill_batch(make, Cache(page), part.queue, part.tokens, part.slot)
    menus, choice = world.groups[0]._decided or pytest.fail("no step")
    assert [r in built.can_run_list for r in reqs] == [True] * len(reqs)
    assert sum(r.extend_len for r in built.can_run_list) == menus[0].levels[choice.level].tokens


def test_dp_rank_without_work_idles_while_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, COST)
    idle, busy = world.round(queues(), queues([], [world.req(500)]))
    assert (idle.order, busy.order) == ((), (LONG,))
    assert [g.start_step() for g in world.groups] == [1, 1]
    assert [p.order for p in world.round(queues(), queues())] == [(), ()]
    assert [g.start_step() for g in world.groups] == [0, 0], "nothing runs in the second round"
    world.round(queues(), queues([], [world.req(500)]))
    assert [g.start_step(prefills=False) for g in world.groups] == [0, 0], "no rank could build a batch"
    assert {g.status()["steps"] for g in world.groups} == {1}


def test_dp_rank_holds_memory_for_guarded_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch takes the memory that the batch before it gave back, so the oldest prompt would never start."""
    world, now = World(monkeypatch, COST), 1.0
    oldest, others, shorts = world.req(24_000), [world.req(3000) for _ in range(4)], [world.req(50)]
    oldest.laps_tag.since = -1.0
    both = queues(shorts, [oldest, *others])

    def picked(now: float) -> tuple[int, int, int]:
        """Return how many short requests, others, and times the oldest are picked; none of them starts."""
        plan, theirs = world.round(both, queues([], [world.req(3000)]), now=now)
        assert theirs.long.picked == (0,), "the other rank goes on"
        return len(plan.picked), sum(i > 0 for i in plan.long.picked), plan.long.picked.count(0)

    while picked(now)[2] == 0:
        now += 0.1
    world.core.lacking = True
    held = [picked(now + 0.1 * i) for i in range(1, 50)]
    assert set(held) == {(1, 0, 1)}, "short requests take little memory"
    assert picked(now + 5.2)[1] > 0, "in vain: others go on for three times as long"
    last = next(at for at in (now + 0.1 * i for i in range(53, 400)) if picked(at)[:2] == (0, 0))
    assert last > now + 20.0, "then the next hold stops short requests, too"
    world.core.lacking = False
    assert picked(last + 0.1)[1] > 0, "it was not ready"


def test_batch_has_only_one_prompt_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, COST)
    begun = [world.req(900, 4000), world.req(300, 4000), world.req(2000, 4000)]
    plan, _ = world.round(queues([], [world.req(40)], begun=begun), queues())
    assert [i for i in plan.long.picked if i < len(begun)] == [1], "the slot is for one, the one with least left"


def test_dp_ranks_plan_separately_until_step_times_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, None)
    sizes = (100, 400, 1600, 800, 3200)
    for i in range(200):
        work = [queues([], [world.req(sizes[(i + 2 * rank) % len(sizes)])]) for rank in range(RANKS)]
        plans = world.round(*work)
        if plans[0] is not None:
            break
        assert plans == [None, None]
        shapes = [[(lined.long[0].tokens, 0)] for lined in work]
        took = COST.seconds([COST.shape(shape) for shape in shapes])

        def ran(rank: int, shapes: Any = shapes, took: float = took) -> None:
            flight: Any = SimpleNamespace(shape=shapes[rank], round=0, lasted_s=took)
            world.groups[rank].record_build(flight)
            world.groups[rank].record_result(flight)

        world.all(ran)
    assert all(plan is not None and plan.order == (LONG,) for plan in plans)
    told = [g.status() for g in world.groups]
    assert [(t["fitted"], t["observed"]) for t in told] == [(False, 5)] * RANKS
    cost = GroupCost(**told[0]["cost"])
    for both in (3000, 10), (700, 700):
        batches = [COST.shape([(n, 0)]) for n in both]
        assert cost.seconds(batches) == pytest.approx(COST.seconds(batches), rel=0.5), "other proportions"


class Emulated:
    """Emulated devices of RANKS ranks, each with its own clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: float) -> None:
        from laps_emulate import group as emulated
        from laps_emulate.spec import DeviceSpec
        from laps_emulate.timeline import Timeline
        from laps_plan.profile import Profile

        self.world = World(monkeypatch, COST)
        monkeypatch.setattr(emulated.torch.distributed, "get_world_size", lambda _: RANKS)
        profile = Profile(name="g", source="made up", coefficients=Coefficients(0, 1, 0, 0, 0), group=COST)
        spec = DeviceSpec("g", profile, slow)
        self.at = [100.0 + 0.5 * rank for rank in range(RANKS)]
        self.runners = [SimpleNamespace(forward=lambda batch: batch.forward_mode.name) for _ in range(RANKS)]
        self.timelines = [Timeline(partial(self._now, rank), partial(self._sleep, rank)) for rank in range(RANKS)]
        self.devices = [
            emulated.GroupDevice(runner, spec, None, timeline)
            for runner, timeline in zip(self.runners, self.timelines, strict=True)
        ]

    def _now(self, rank: int) -> float:
        self.at[rank] += 1e-6
        return self.at[rank]

    def _sleep(self, rank: int, seconds: float) -> None:
        self.at[rank] += seconds

    def run(self, rank: int, shape: list[tuple[int, int]]) -> Any:
        """Run one rank's part of a step."""
        new, old = zip(*shape, strict=True) if shape else ((), ())
        mode = SimpleNamespace(name="EXTEND" if new else "IDLE")
        batch = SimpleNamespace(forward_mode=mode, extend_seq_lens_cpu=new, extend_prefix_lens_cpu=old)
        return self.runners[rank].forward(batch)


def test_emulated_group_step_lasts_predicted_group_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = 2.0
    emulated = Emulated(monkeypatch, slow)

    def step(*shapes: list[tuple[int, int]]) -> list[str]:
        return emulated.world.all(lambda rank: emulated.run(rank, shapes[rank]))

    assert step([(3000, 0)], []) == ["EXTEND", "IDLE"]
    took_s = slow * COST.seconds([COST.shape([(3000, 0)]), COST.shape([])])
    ends = pytest.approx([100.5 + took_s] * 2, abs=2e-3)
    assert [t.free for t in emulated.timelines] == ends, "it begins when the last one is there"
    step([], [])
    assert [t.free for t in emulated.timelines] == ends, "nothing runs"


def test_emulated_step_runs_in_pause_of_sliced_step(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated, parts = Emulated(monkeypatch, 1.0), 4
    left: list[list[float]] = [[] for _ in range(RANKS)]

    def step(rank: int) -> None:
        def pause(layers_left: float) -> bool:
            left[rank].append(layers_left)
            if len(left[rank]) == 2:
                emulated.run(rank, [] if rank == 0 else [(50, 0)])
            return True

        with emulated.devices[rank].cut(0.0, pause, parts):
            emulated.run(rank, [(3000, 0)] if rank == 0 else [])

    emulated.world.all(step)
    layers = emulated.devices[0].layers
    assert left == [[pytest.approx(layers * share) for share in (0.75, 0.5, 0.25)]] * RANKS
    long_s, short_s = (COST.seconds([COST.shape([(n, 0)]), COST.shape([])]) for n in (3000, 50))
    assert [t.free for t in emulated.timelines] == pytest.approx([100.5 + long_s + short_s] * RANKS, abs=2e-2)
    lasted = [device.record.as_dict() for device in emulated.devices]
    assert [one["steps"] for one in lasted] == [1, 1], "each has computed in one of the two"


@pytest.mark.parametrize(
    ("ranks", "together", "priorities", "why"),
    [
        (1, True, False, "one data-parallel"),
        (2, False, False, "together"),
        (2, True, True, "priority"),
        (2, True, False, None),
    ],
)
def test_group_reports_why_dp_ranks_plan_separately(
    monkeypatch: pytest.MonkeyPatch, ranks: int, together: bool, priorities: bool, why: str | None
) -> None:
    from sglang_laps import group

    monkeypatch.setattr(group, "get_parallel", lambda: SimpleNamespace(attn_dp_size=ranks))
    scheduler: Any = SimpleNamespace(require_mlp_sync=together, enable_priority_scheduling=priorities)
    said = group.why_not(scheduler)
    assert (said is None) if why is None else why in str(said)
