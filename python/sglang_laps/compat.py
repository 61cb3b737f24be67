"""Differences between the releases of SGLang that LAPS runs on, chosen at run time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler as Stock
else:
    Stock = object  # the class that the mixin extends

_SCHEDULER = "managers.scheduler.Scheduler"
_DRAFTS = (
    "eagle_utils.build_tree_kernel_efficient_func",
    "eagle_worker_common.assign_draft_cache_locs_contiguous_func",
    "spec_utils.fill_front_out_cache_loc_func",
)
_LOOPS = "disaggregation.prefill.SchedulerDisaggregationPrefillMixin"


class Release(NamedTuple):
    """Differences between one release and the newest."""

    expected: Mapping[str, str]
    """Values of ``Seam.expected`` that differ, by name."""
    guards_early_send: bool
    """True with SGLang #44070: KV of a cached prefix is not sent before the host tier has loaded it."""
    asks_for_nccl: bool
    """True if a platform can say that it has no NCCL."""
    drafts_in_pauses: bool
    """True if speculative decoding in the pauses of a server without disaggregation was tested."""
    takes_http_app: bool
    """True if the HTTP processes of --tokenizer-worker-num > 1 can serve another application than SGLang's."""
    missing: frozenset[str] = frozenset()
    """Names that are missing in this release; LAPS works without them."""


RELEASES: dict[str, Release] = {
    "0.5.22": Release(
        {
            f"{_SCHEDULER}.get_next_batch_to_run": "7d0d7aaa3776",
            f"{_SCHEDULER}._get_new_batch_prefill_raw": "1bd26b51382a",
            f"{_SCHEDULER}.update_running_batch": "0413ac479d78",
            f"{_SCHEDULER}.maybe_send_cached_prefix_chunk": "self, req",
            f"{_SCHEDULER}.get_num_allocatable_reqs": "self, running_bs, beam_width=, running_batch=",
            f"{_LOOPS}.event_loop_overlap_disagg_prefill": "7daecdd84fba",
            "session.session_controller.Session.create_req": (
                "self, req, tokenizer, vocab_size, eos_token_ids=, disagg_mode="
            ),
            "utils.device_timer.DeviceTimer.wrap": "62ee7bc99632",
        },
        guards_early_send=False,
        asks_for_nccl=False,
        drafts_in_pauses=False,
        takes_http_app=False,
        # So a request that ends while it waits has no receipt, and drafts are not verified without a GPU.
        missing=frozenset({f"{_SCHEDULER}.send_abort_output", *(f"speculative.{name}" for name in _DRAFTS)}),
    ),
    "0.5.23": Release({}, guards_early_send=True, asks_for_nccl=True, drafts_in_pauses=True, takes_http_app=True),
}
"""Supported releases, the newest last. The table in ``seams`` has the names of the newest release."""


@cache
def installed() -> str:
    """Return the installed release of SGLang. Raises PackageNotFoundError."""
    return version("sglang")


def release() -> Release:
    """Return the row of the installed release, or of the newest if the installed one is not supported."""
    return RELEASES.get(installed(), list(RELEASES.values())[-1])


class EarlySendGuard(Stock):  # type: ignore[misc]
    """Mixin with #44070: the load of a paused batch may still write a prefix that a preempting batch has found."""

    laps: Any
    _laps_loads = False

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; note whether the host tier loads KV for it."""
        if self.laps is not None:
            self._laps_loads = batch.hicache_consumer_index >= 0
        return super().run_batch(batch, *args, **kwargs)

    def maybe_send_cached_prefix_chunk(self, req: Any, *args: Any, **kwargs: Any) -> None:
        """Send a cached prefix early if no load is under way; otherwise the send after the forward pass includes it."""
        held = req.pending_bootstrap
        # SGLang does not send a request that is not bootstrapped, and does the rest of its bookkeeping.
        req.pending_bootstrap = held or self._laps_loads
        try:
            super().maybe_send_cached_prefix_chunk(req, *args, **kwargs)
        finally:
            req.pending_bootstrap = held


def bases() -> tuple[type, ...]:
    """Return the classes to mix into the scheduler of the installed release."""
    return () if release().guards_early_send else (EarlySendGuard,)
