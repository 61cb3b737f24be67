"""SGLang's kernels for building and verifying drafts, in plain PyTorch.

Tensors are on the CPU. n: requests, k: branches of a draft (``--speculative-eagle-topk``), m: tokens of a tree
(``--speculative-num-draft-tokens``).
"""

from __future__ import annotations

from typing import Any

import torch

NONE = -1


def rows_from(rows: torch.Tensor, table: torch.Tensor, begins: torch.Tensor, count: int) -> torch.Tensor:
    """Return the next `count` entries [n * count] of these `rows` [n] of a table, from column `begins` [n] on."""
    places = begins.long().unsqueeze(1) + torch.arange(count)
    return table[rows.long().unsqueeze(1), places].long().flatten()


def draft_places(
    rows: torch.Tensor, table: torch.Tensor, begins: torch.Tensor, places: torch.Tensor, topk: int, steps: int, **_: Any
) -> None:
    """Fill in the `places` [n * k * steps] in the KV cache to which a draft writes."""
    places.copy_(rows_from(rows, table, begins, topk * steps))


def verified_places(
    *, req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start_offset: torch.Tensor, **sizes: Any
) -> torch.Tensor:
    """Return the places [n * m] in the KV cache to which a verification writes."""
    return rows_from(req_pool_indices, req_to_token, start_offset, sizes["draft_token_num"])


def assign_places(
    rows: torch.Tensor, table: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, _: int
) -> None:
    """Write `places`, one request after the other, to columns `begins` to `ends` [n] of the `rows` [n] of a table."""
    counts = (ends - begins).tolist()
    for row, begin, some in zip(rows.tolist(), begins.tolist(), torch.split(places, counts), strict=True):
        table[row, begin : begin + len(some)] = some.to(table.dtype)


def gather_rows(indices: torch.Tensor, *buffers: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the rows `indices` of each buffer."""
    return tuple(None if b is None else b[indices] for b in buffers)


def build_tree(
    parents: torch.Tensor,
    chosen: torch.Tensor,
    seq_lens: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    child: torch.Tensor,
    sibling: torch.Tensor,
    topk: int,
    depth: int,
    tokens: int,
    mode: Any,
) -> None:
    """Fill in the trees: which token sees which (`mask`, n * m * m), `positions` [n * m], the place of each token
    (`index` [n, m]), its first `child` and next `sibling` [n, m], -1 for none. `chosen` [n, m - 1]: numbers of the
    drafted tokens. `parents`: for each k tokens, the number of the token that they come from."""
    sees = mask.view(-1, tokens, tokens)
    sees.fill_(False)
    places = positions.view(-1, tokens)
    index.copy_(torch.arange(index.numel()).view_as(index))
    for row, numbers in enumerate(chosen.tolist()):
        at = {number: i + 1 for i, number in enumerate(numbers)}
        above = [0] + [at.get(int(parents[row, n // topk]), NONE) if n // topk else 0 for n in numbers]
        for i in range(tokens):
            level = _mark(sees[row, i], above, i)
            places[row, i] = int(seq_lens[row]) + level
        for i in range(tokens - 1, 0, -1):
            if above[i] != NONE:
                sibling[row, i], child[row, above[i]] = int(child[row, above[i]]), i


def _mark(sees: torch.Tensor, above: list[int], i: int) -> int:
    """Mark all tokens that token `i` sees, and return the level of token `i`."""
    level = 0
    sees[0] = True
    while i > 0:
        sees[i] = True
        level, i = level + 1, above[i]
    return level


def verify_greedily(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = NONE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk down each tree while a child is the model's next token after its parent. Fill in the model's tokens
    (`predicts` [n * m]), the places of the accepted tokens (`accept_index` [n, depth], -1 after the last) and their
    number [n], without the root, which is no draft. Return these three."""
    drafted, said = candidates.tolist(), target_predict.tolist()
    child, sibling = retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    tokens = candidates.shape[1]
    for row in range(len(drafted)):
        at, right = 0, 0
        accept_index[row, 0] = retrieve_index[row, 0]
        while True:
            predicts[row * tokens + at] = said[row][at]
            i = child[row][at] if right + 1 < accept_index.shape[1] else NONE
            while i != NONE and drafted[row][i] != said[row][at]:
                i = sibling[row][i]
            if i == NONE:
                break
            at, right = i, right + 1
            accept_index[row, right] = retrieve_index[row, i]
        accept_token_num[row] = right
    return predicts, accept_index, accept_token_num


def last_tokens(accepted: torch.Tensor, counts: torch.Tensor, last: torch.Tensor, width: int, _: int) -> None:
    """Fill in the last of each request's `counts` [n] tokens in `accepted` [n * width]."""
    last.copy_(accepted.view(-1, width).gather(1, counts.long().unsqueeze(1) - 1).squeeze(1))


def front_places(counts: torch.Tensor, places: torch.Tensor, front: torch.Tensor) -> None:
    """Pack the first `counts` [n] of the `places` [n * m] of each request into `front`."""
    kept = torch.cat([w[:c] for w, c in zip(places.view(len(counts), -1), counts.tolist(), strict=True)])
    front[: len(kept)] = kept


def accepted_places(index: torch.Tensor, places: torch.Tensor, accepted: torch.Tensor, _: int) -> None:
    """Pack the `places` that `index` names (-1: none) into `accepted`."""
    kept = places[index[index != NONE].long()]
    accepted[: len(kept)] = kept


def shift_left(
    tokens: torch.Tensor,
    begins: torch.Tensor,
    counts: torch.Tensor,
    new: torch.Tensor,
    last: torch.Tensor | None = None,
) -> torch.Tensor:
    """Move the `tokens` of each request, `counts` [n] from `begins` [n] on, one place to the left, and enter its `new`
    token [n, 1] at its end, or at `last` [n]. Return `tokens`, which is changed in place."""
    for i, (begin, count) in enumerate(zip(begins.tolist(), counts.tolist(), strict=True)):
        if not count:
            continue
        tokens[begin : begin + count - 1] = tokens[begin + 1 : begin + count].clone()
        tokens[begin + count - 1 if last is None else int(last[i])] = new.flatten()[i]
    return tokens
