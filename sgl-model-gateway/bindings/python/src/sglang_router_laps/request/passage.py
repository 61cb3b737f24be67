"""A request's way through the router: attempts at pairs of servers until a pair has answered."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field

from laps_core.pools.choice import Choice, TriedServers
from laps_core.pools.instances import Instance
from sglang_router.router_args import RouterArgs

from ..queue import TurnedAway, misses_deadline
from ..router import Router
from ..servers.aborts import Aborted, LiveRequest
from ..servers.upstream import Lost
from .attempt import Attempt
from .call import Call
from .replies import Client, Refused, message_of

logger = logging.getLogger(__name__)

Ended = Refused | Lost
"""Failures of an attempt."""
EARNED = 0.2
"""Retries added to the budget per request: overloaded servers must not get much more load from retries."""
SAVED_MAX = 100.0
"""Most retries in the budget, and the budget at the start."""


class Retries:
    """Retry policy of --retry-* and --disable-retries, with a budget, shared by all requests, for retries after a 503
    or a failed KV transfer."""

    def __init__(self, args: RouterArgs) -> None:
        # The stock flags count the first attempt, too.
        self.attempts = 1 if args.disable_retries else max(1, args.retry_max_retries)
        """Most attempts of one request, the first one included."""
        self._args = args
        self._saved = SAVED_MAX

    def pause_s(self, retry: int) -> float:
        """Return the pause before retry number ``retry``, counted from 0 (seconds)."""
        args = self._args
        # Far larger powers would overflow, and the longest pause is reached long before.
        pause_ms = args.retry_initial_backoff_ms * args.retry_backoff_multiplier ** min(retry, 64)
        jitter = 1 + args.retry_jitter_factor * (2 * random.random() - 1)
        return max(0.0, min(pause_ms, args.retry_max_backoff_ms) / 1e3 * jitter)

    def earn(self) -> None:
        """Add a request's share to the budget."""
        self._saved = min(self._saved + EARNED, SAVED_MAX)

    def spend(self) -> bool:
        """Take one retry out of the budget. Return False if no retry is left."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True


@dataclass(slots=True)
class Passage:
    """Processing of one request whose body has been read.

    ``run`` answers the client, or raises TurnedAway while the client has got nothing.
    """

    router: Router
    retries: Retries
    call: Call
    client: Client
    tried: TriedServers = field(default_factory=TriedServers)
    live: LiveRequest = field(init=False)
    servers_lost: int = 0
    """Number of servers that were lost while they had this request."""

    def __post_init__(self) -> None:
        self.live = LiveRequest(self.call.ids.client_ids())

    async def run(self) -> None:
        """Wait for a slot if no slot is free, then try pairs of servers. Raises TurnedAway."""
        router, queue = self.router, self.router.queue
        self.call.read(router.counter)
        placed = queue.enter()
        if router.aborter.was_used(self.live):
            # An abort of the earlier request must not end this one.
            self.call.ids.renew()
        router.aborter.add(self.live)
        try:
            if not placed:
                await self._wait()
                placed = True
            await self._try()
        except Aborted:
            raise TurnedAway(400, "abort", "aborted while no server worked on it") from None
        finally:
            router.aborter.remove(self.live)
            if placed:
                queue.leave()

    async def _wait(self) -> None:
        """Wait in the queue. Raises TurnedAway and Aborted."""
        router, call = self.router, self.call
        new, threshold = call.ask.total, router.config.threshold
        if new > threshold:
            new = min((call.ask.new(p.prefixes) for i in router.pools.instances for p in i.places), default=new)
        router.queue.check_admission()
        router.counts.waited += 1
        began = time.monotonic()
        try:
            async with self.live.waiting():
                await router.queue.wait(call.waiting(new, threshold), call.refuse_at)
        finally:
            call.trail.placed = began, time.monotonic()

    async def _pair(self) -> tuple[Choice, Instance] | None:
        """Wait for the next pair of servers and return it; None if a role stays without a healthy server for too
        long."""
        pools, queue, call = self.router.pools, self.router.queue, self.call
        async with self.live.waiting():
            while (
                pair := pools.choose_pair(call.ask, self.tried, call.kv_tokens)
            ) is None and await queue.wait_for_servers(call.refuse_at):
                pass
            return pair

    async def _try(self) -> None:
        """Try pairs of servers until a pair answers, as often as --retry-* allow while the client has got nothing."""
        router, call, client = self.router, self.call, self.client
        self.retries.earn()
        ended: Ended | None = None
        for n in range(self.retries.attempts):
            pair = router.pools.choose_pair(call.ask, self.tried, call.kv_tokens) or await self._pair()
            if self.live.aborted:
                raise Aborted
            if call.refuse_at < time.monotonic():
                raise router.queue.too_late(call.refuse_at)
            if pair is None:
                if not isinstance(ended, Refused):
                    ended = None  # no server has the request: it may be sent again
                break
            if pair[0].late_s:
                router.counts.predicted_late += 1
                raise misses_deadline(pair[0].late_s)
            call.trail.decision = "retry" if n else pair[0].why
            if not n:
                router.journal.note_choice(pair[0], call.ask.total)
                call.length_class = call.trail.length_class = pair[0].length_class
                call.trail.tokens = pair[0].new_tokens
            try:
                left_s = router.args.request_timeout_secs - (call.age_s if n or call.trail.placed else 0.0)
                if left_s <= 0:
                    raise TimeoutError
                await Attempt(router, call, *pair, client, left_s, self.live).run()
                return
            except (Refused, Lost) as e:
                ended = e
            except TimeoutError:
                logger.warning("%s timed out after %.0f s", call.ids.name, call.age_s)
                await self._fail(504, "timeout", "timed out")
                return
            if isinstance(ended, Refused) and ended.transfer_failed:
                self.tried.pairs.add((pair[0].instance, pair[1]))
            else:
                self.tried.servers.add(ended.instance)
            again = await self._should_retry(ended)
            again = again and not (client.started or self.live.aborted) and n + 1 < self.retries.attempts
            if again or not isinstance(ended, Refused):
                logger.warning("%s %s%s", call.ids.name, ended, "; trying another" if again else "")
            if not again:
                break
            router.counts.retried += 1
            async with self.live.waiting():
                await asyncio.sleep(self.retries.pause_s(n))
        await self._conclude(ended)

    async def _should_retry(self, ended: Ended) -> bool:
        """Record what the failure says about the server. Return True if another pair may do better."""
        router = self.router
        if isinstance(ended, Refused):
            # After a failed transfer any new pair will do, even with a server that admits no request at the moment.
            left = ended.retryable and router.pools.has_untried_pair(self.tried, now=not ended.transfer_failed)
            return left and self.retries.spend()
        if ended.blameless or (ended.kind == "unreachable" and router.health.stood_still):
            ended.instance.rest()
            return ended.kind != "exhausted"
        shared = not ended.sent or ended.instance.note_lost()
        router.health.record_loss(ended.instance, ended.kind)
        if not ended.sent:
            return True
        # A request that crashed a server may crash the next server. A request that was alone on a server that died is
        # not retried; a request that was there with other requests is retried once.
        self.servers_lost += 1
        if self.servers_lost > 1:
            return False
        return shared or ended.kind == "cut" or not await router.health.refuses(ended.instance)

    async def _conclude(self, ended: Ended | None) -> None:
        """Answer the client with the last attempt's failure; None = there was no pair to try."""
        client = self.client
        if isinstance(ended, Refused):
            if ended.transfer_failed and not client.started:
                # No server refused the request, and another pair may serve it later.
                await self._fail(503, "transfer_failed", message_of(self.call.ids.with_client_ids(ended.reply.body)))
            else:
                await client.send_reply(ended.reply)
        elif ended is not None and ended.sent:
            await self._fail(502, "upstream_lost", str(ended))
        else:
            self.router.counts.rejected += 1
            kind, why = "no_connection", f"request {self.call.ids.name}: {ended}"
            if ended is None:
                kind, why = "no_instance", f"no {self.router.pools.missing_role()} server is healthy"
            await client.refuse(503, kind, why)

    async def _fail(self, status: int, kind: str, why: str) -> None:
        self.router.counts.failed += 1
        await self.client.refuse(status, kind, f"request {self.call.ids.name}: {why}")
