"""Draft trees without a GPU: their construction, their attention masks, and their verification."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

NONE = -1


def built(topk: int, tokens: int, parents: list[list[int]], chosen: list[list[int]]) -> dict[str, torch.Tensor]:
    """Build the draft trees of requests whose prompts have 10, 20, ... tokens."""
    from laps_emulate.host import drafts

    n = len(chosen)
    made = {
        "mask": torch.ones(n * tokens * tokens, dtype=torch.bool),
        "positions": torch.zeros(n * tokens, dtype=torch.long),
        **{name: torch.full((n, tokens), NONE) for name in ("index", "child", "sibling")},
    }
    seq_lens = torch.arange(1, n + 1) * 10
    mask, positions, index, child, sibling = made.values()
    drafts.build_tree(
        torch.tensor(parents), torch.tensor(chosen), seq_lens, mask, positions, index, child, sibling,
        topk, 3, tokens, None,
    )  # fmt: skip
    return made


def test_draft_chain_has_causal_mask() -> None:
    made = built(1, 4, [[NONE, 0, 1]] * 2, [[0, 1, 2]] * 2)
    assert made["positions"].tolist() == [10, 11, 12, 13, 20, 21, 22, 23]
    assert torch.equal(made["mask"].view(2, 4, 4), torch.ones(2, 4, 4).tril().bool())
    assert made["child"].tolist() == [[1, 2, 3, NONE]] * 2
    assert made["index"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def tree() -> dict[str, torch.Tensor]:
    """Return a tree whose root has the children 1 and 2; 3 is a child of 2, and 4 of 1."""
    return built(2, 5, [[NONE, 0, 1]], [[0, 1, 4, 2]])


def test_draft_tree_tokens_see_only_ancestors() -> None:
    made = tree()
    seen = [[i for i in range(5) if row[i]] for row in made["mask"].view(5, 5)]
    assert seen == [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4]]
    assert made["positions"].tolist() == [10, 11, 11, 12, 12]
    assert made["child"].tolist() == [[1, 4, 3, NONE, NONE]]
    assert made["sibling"].tolist() == [[NONE, 2, NONE, NONE, NONE]]


def test_greedy_verification_accepts_longest_matching_path() -> None:
    from laps_emulate.host import drafts

    made = tree()
    drafted, said = torch.tensor([[50, 51, 52, 53, 54]]), torch.tensor([[52, 99, 53, 77, 98]])
    predicts, index = torch.zeros(5, dtype=torch.int32), torch.full((1, 4), NONE, dtype=torch.int32)
    counts = torch.zeros(1, dtype=torch.int32)
    drafts.verify_greedily(predicts, index, counts, drafted, made["index"], made["child"], made["sibling"], said)
    assert (index.tolist(), counts.tolist()) == ([[0, 2, 3, NONE]], [2])
    assert predicts[[0, 2, 3]].tolist() == [52, 53, 77]
    last = torch.zeros(1, dtype=torch.int32)
    drafts.last_tokens(predicts[index], counts + 1, last, 4, 1)
    assert last.tolist() == [77]
    places, front, right = torch.arange(100, 105), torch.zeros(4).long(), torch.zeros(4).long()
    drafts.front_places(counts + 1, places, front)
    drafts.accepted_places(index.flatten(), places, right, 4)
    assert (front[:3].tolist(), right[:3].tolist()) == ([100, 101, 102], [100, 102, 103])


def test_accepted_drafts_are_limited_by_index_size() -> None:
    from laps_emulate.host import drafts

    made = built(1, 4, [[NONE, 0, 1]], [[0, 1, 2]])
    index, counts = torch.full((1, 3), NONE), torch.zeros(1).long()
    drafted, said = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[6, 7, 8, 9]])
    drafts.verify_greedily(
        torch.zeros(4).long(), index, counts, drafted, made["index"], made["child"], made["sibling"], said
    )
    assert (index.tolist(), counts.tolist()) == ([[0, 1, 2]], [2])


def test_cache_slots_match_request_table() -> None:
    from laps_emulate.host import drafts

    table, rows, begins = torch.zeros(4, 20, dtype=torch.int32), torch.tensor([1, 3]), torch.tensor([2, 5])
    drafts.assign_places(rows, table, begins, begins + torch.tensor([3, 0]), torch.tensor([7, 8, 9]), 2)
    assert table[1, :6].tolist() == [0, 0, 7, 8, 9, 0]
    assert not table[3].any()
    found = torch.zeros(4).long()
    drafts.draft_places(rows, table, begins, found, 1, 2)
    assert found.tolist() == [7, 8, 0, 0]
    where = {"req_pool_indices": rows, "req_to_token": table, "start_offset": begins}
    assert drafts.verified_places(**where, draft_token_num=2).tolist() == [7, 8, 0, 0]
    assert drafts.gather_rows(torch.tensor([1]), table, None)[1] is None


def test_draft_and_verification_attention_equals_sequential_tokens() -> None:
    """One request of 6 tokens; a draft of two branches of two, and a tree of four."""
    from laps_emulate.host.attention import DraftStep, HostAttention, attend, unseen
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    torch.manual_seed(1)
    keys, values = torch.randn(20, 1, 8), torch.randn(20, 1, 8)
    layer = SimpleNamespace(
        qk_head_dim=8, v_head_dim=8, tp_q_head_num=2, layer_id=0, logit_cap=0.0, scaling=0.4, sliding_window_size=-1
    )

    def backend(kind: Any, **more: Any) -> Any:
        made = kind.__new__(kind)
        made.use_sliding_window_kv_pool, made.swa_out_cache_loc = False, None
        made.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda _: keys, get_value_buffer=lambda _: values)
        made.req_to_token_pool = SimpleNamespace(req_to_token=torch.arange(20).unsqueeze(0))
        vars(made).update(more)
        return made

    def expected(q: torch.Tensor, seen: list[int]) -> torch.Tensor:
        hidden = torch.zeros(1, len(seen), dtype=torch.bool)
        return attend(q.view(1, 2, 8), keys[seen], values[seen], hidden, layer, None)[0]

    prompt, q = list(range(6)), torch.randn(4, 16)
    batch = SimpleNamespace(seq_lens=torch.tensor([6]), req_pool_indices=torch.tensor([0]))
    step = backend(DraftStep, _topk=2, _steps=3, _step=1)
    got = step.forward_decode(q[:2], None, None, layer, batch)
    assert torch.allclose(got[0], expected(q[0], [*prompt, 6, 7]))
    assert torch.allclose(got[1], expected(q[1], [*prompt, 9, 10]))
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.spec_info = SimpleNamespace(
        draft_token_num=4, custom_mask=mask.flatten(), positions=torch.tensor([6, 7, 7, 8])
    )
    got = backend(HostAttention).forward_extend(q, None, None, layer, batch)
    for i, seen in enumerate(([6], [6, 7], [6, 8], [6, 8, 9])):
        assert torch.allclose(got[i], expected(q[i], [*prompt, *seen]), atol=1e-6), i
    layer.sliding_window_size = 1
    assert unseen(torch.tensor([5]), torch.arange(8), layer).tolist() == [[True] * 4 + [False] * 2 + [True] * 2]


def test_shift_left_inserts_token_at_end_or_given_position() -> None:
    from laps_emulate.host import drafts

    begins, counts, new = torch.tensor([0, 4, 4]), torch.tensor([4, 0, 2]), torch.tensor([[70], [71], [72]])
    tokens = torch.tensor([1, 2, 3, 4, 5, 6])
    assert drafts.shift_left(tokens, begins, counts, new) is tokens
    assert tokens.tolist() == [2, 3, 4, 70, 6, 72]
    drafts.shift_left(tokens, begins, counts, new, torch.tensor([1, 9, 5]))
    assert tokens.tolist() == [3, 70, 70, 70, 72, 72]
