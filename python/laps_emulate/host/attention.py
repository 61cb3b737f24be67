"""SGLang's attention in plain PyTorch, with what SGLang leaves out: sinks, a cap on logits, sliding windows in a KV
pool of their own."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

ROWS = 512
"""Queries computed at once: the scores of 512 queries for 8,192 keys and 8 heads take 128 MiB."""


class HostAttention(TorchNativeAttnBackend):
    """The backend ``torch_native`` of the host platform, which adds the cases that SGLang's backend leaves out."""

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Return the sequence length of a padding row. Data-parallel attention asks for it without graphs, too."""
        return 1

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, sinks: Any = None
    ) -> torch.Tensor:
        """Return the attention output [tokens, heads * value size] of new tokens over their prefixes and themselves."""
        mode = forward_batch.forward_mode
        verifies = mode.is_target_verify()
        # Data-parallel attention pads a rank's rows: SGLang's backend takes no row that is shorter than a draft's.
        if not (verifies or mode.is_draft_extend_v2() or self.laps_left_out(layer, sinks)):
            output: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            return output
        self._save(layer, forward_batch, k, v, save_kv_cache)
        if verifies:
            return self._verify(q, layer, forward_batch, sinks)
        return self._attend(q, layer, forward_batch, forward_batch.extend_seq_lens.tolist(), sinks)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, sinks: Any = None
    ) -> torch.Tensor:
        """Return the attention output [sequences, heads * value size] of one new token of each sequence."""
        if not self.laps_left_out(layer, sinks):
            output: torch.Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            return output
        self._save(layer, forward_batch, k, v, save_kv_cache)
        return self._attend(q, layer, forward_batch, [1] * len(forward_batch.seq_lens), sinks)

    def laps_left_out(self, layer: Any, sinks: Any) -> bool:
        # SGLang's backend computes latent attention, too, but over the whole prefix and in PyTorch's slow form.
        latent = layer.qk_head_dim != layer.v_head_dim
        return latent or sinks is not None or layer.logit_cap > 0 or self._own_pool(layer)

    def _own_pool(self, layer: Any) -> bool:
        """Return True if keys and values of this layer are in the pool for sliding windows, in other rows."""
        return self.use_sliding_window_kv_pool and layer.sliding_window_size > -1

    def _save(self, layer: Any, forward_batch: Any, k: Any, v: Any, wanted: bool) -> None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        if wanted and k is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)

    def _attend(self, q: Any, layer: Any, forward_batch: Any, new: list[int], sinks: Any) -> torch.Tensor:
        q, output = self._views(q, layer)
        begin = 0
        for i, total in enumerate(forward_batch.seq_lens.tolist()):
            key, value = self._kept(layer, forward_batch.req_pool_indices[i], slice(total), q.dtype)
            for first in range(begin, begin + new[i], ROWS):
                part = slice(first, min(first + ROWS, begin + new[i]))
                here = torch.arange(part.stop - part.start) + total - new[i] + first - begin
                output[part] = attend(q[part], key, value, unseen(here, torch.arange(total), layer), layer, sinks)
            begin += new[i]
        return output

    def _verify(self, q: Any, layer: Any, forward_batch: Any, sinks: Any) -> torch.Tensor:
        """Compute attention in draft trees: a token sees itself, its ancestors, and the tokens before the tree."""
        q, output = self._views(q, layer)
        tree = forward_batch.spec_info
        m = tree.draft_token_num
        seen, places = tree.custom_mask.view(-1, m, m), tree.positions.view(-1, m)
        # Data-parallel attention pads a rank's rows to the number of the other ranks' rows.
        output[places.numel() :] = 0.0
        for i, total in enumerate(forward_batch.seq_lens.tolist()[: len(places)]):
            key, value = self._kept(layer, forward_batch.req_pool_indices[i], slice(total + m), q.dtype)
            hidden = unseen(places[i], torch.cat((torch.arange(total), places[i])), layer)
            hidden[:, total:] |= ~seen[i]
            part = slice(i * m, i * m + m)
            output[part] = attend(q[part], key, value, hidden, layer, sinks)
        return output

    def _views(self, q: Any, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries by head, and an empty output."""
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return q, q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)

    def _kept(self, layer: Any, request: Any, which: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cached keys and values of the tokens `which` of a request."""
        rows = self.req_to_token_pool.req_to_token[request, which]
        if self._own_pool(layer):
            rows = self.token_to_kv_pool.translate_loc_from_full_to_swa(rows)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        return keys[rows].to(dtype), values[rows].to(dtype)


class DraftStep(HostAttention):
    """Attention of one step of a draft. Each branch sees the tokens before the draft, and its own tokens."""

    def __init__(self, runner: Any, topk: int, steps: int, step: int) -> None:
        super().__init__(runner)
        self._topk, self._steps, self._step = topk, steps, step

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, sinks: Any = None
    ) -> torch.Tensor:
        """Return the attention output [sequences * branches, heads * value size] of one new token of each branch."""
        self._save(layer, forward_batch, k, v, save_kv_cache)
        q, output = self._views(q, layer)
        for i, total in enumerate(forward_batch.seq_lens.tolist()):
            for branch in range(self._topk):
                first, row = total + branch * self._steps, i * self._topk + branch
                places = torch.cat((torch.arange(total), torch.arange(first, first + self._step + 1)))
                key, value = self._kept(layer, forward_batch.req_pool_indices[i], places, q.dtype)
                hidden = unseen(torch.tensor([total + self._step]), torch.arange(len(places)), layer)
                output[row] = attend(q[row : row + 1], key, value, hidden, layer, sinks)[0]
        return output


class DraftSteps:
    """Attention of all steps of a draft, in the form that SGLang's draft worker expects."""

    def __init__(self, runner: Any, topk: int, steps: int) -> None:
        self.attn_backends = [DraftStep(runner, topk, steps, i) for i in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for one in self.attn_backends:
            one.init_forward_metadata(forward_batch)


def unseen(here: torch.Tensor, there: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return True [n, m] if the query at position `here` [n] does not see the key at position `there` [m]."""
    hidden = there.unsqueeze(0) > here.unsqueeze(1)
    if layer.sliding_window_size > -1:
        hidden |= there.unsqueeze(0) < here.unsqueeze(1) - layer.sliding_window_size
    return hidden


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, layer: Any, sinks: Any
) -> torch.Tensor:
    """Return the output [n, heads * value size] of `q` [n, heads, size] over keys `k` and values `v` [m, key heads,
    size]. `hidden` [n, m]: True if a query does not see a key. `layer`: gives scale and cap. `sinks` [heads]: logits
    without a value."""
    n, heads, size = q.shape
    groups = q.view(n, k.shape[1], heads // k.shape[1], size)
    scores = torch.einsum("ngrd,mgd->grnm", groups, k) * layer.scaling
    if layer.logit_cap > 0:
        scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(k.shape[1], -1, 1, 1).expand(-1, -1, n, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[0]]
    return torch.einsum("grnm,mgd->ngrd", weights, v).reshape(n, -1)
