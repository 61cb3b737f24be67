"""One request on its way through the router: to pairs of servers until one has answered, and back to the client."""

from __future__ import annotations

import asyncio
import logging

from ..pools.pairs import Tried
from ..router import Router
from ..servers.upstream import Local, Lost
from .attempt import Attempt
from .call import Call
from .client import Client
from .replies import Refused, message_of

logger = logging.getLogger(__name__)

Ended = Refused | Lost | Local
"""How an attempt failed."""


class Passage:
    """A request whose body has been read. ``run`` answers it, whatever happens."""

    def __init__(self, router: Router, call: Call, client: Client) -> None:
        self._router = router
        self._call = call
        self._client = client
        self._tried = Tried()
        self._deaths = 0
        """Servers that were lost with this request on them."""

    async def run(self) -> None:
        """Try on a pair of servers, and on others as far as --retry-* allow while nothing has been sent."""
        router, call, client = self._router, self._call, self._client
        call.read(router.counter)
        router.retries.earn()
        ended: Ended | None = None
        for n in range(router.retries.attempts):
            pair = router.pairs.choose(call.ask, self._tried)
            if pair is None:
                break
            if not n:
                router.journal.note_choice(pair[0], call.ask.total)
                call.length_class = pair[0].length_class
            try:
                attempt = Attempt(router, call, client, *pair, router.sessions.timeout(call.age_s) if n else None)
                await attempt.run()
                return
            except (Refused, Lost, Local) as e:
                ended = e
            except TimeoutError:
                logger.warning("%s timed out after %.0f s", call.ids.name, call.age_s)
                await self._fail(504, "timeout", "timed out")
                return
            if isinstance(ended, Refused) and ended.unjoined:
                self._tried.ways.add((pair[0].instance, pair[1]))
            else:
                self._tried.servers.add(ended.instance)
            again = await self._worth_another(ended)
            again = again and not (client.started or attempt.held.asked) and n + 1 < router.retries.attempts
            if again or not isinstance(ended, Refused):
                logger.warning("%s %s%s", call.ids.name, ended, "; trying another" if again else "")
            if not again:
                break
            router.counts.retried += 1
            await asyncio.sleep(router.retries.pause_s(n))
        await self._conclude(ended)

    async def _worth_another(self, ended: Ended) -> bool:
        """Whether another pair may do better; what is learnt of the server is noted."""
        router = self._router
        if isinstance(ended, Local):
            ended.instance.rest()
            return not ended.exhausted
        if isinstance(ended, Refused):
            # Pairs that cannot be joined are to be left even for one that has no room at the moment.
            left = ended.elsewhere and router.pairs.left(self._tried, now=not ended.unjoined)
            return left and router.retries.spend()
        shared = not ended.sent or ended.instance.note_lost()
        router.health.lost(ended.instance, ended.kind)
        if not ended.sent:
            return True
        # What kills servers kills the one it came to. Who was there alone when it died is not sent to the next; who
        # was there with others is, once.
        self._deaths += 1
        if self._deaths > 1:
            return False
        return shared or ended.kind == "cut" or not await router.health.refuses(ended.instance)

    async def _conclude(self, ended: Ended | None) -> None:
        """Answer with how the last attempt ended; None: there was nowhere to go."""
        client = self._client
        if isinstance(ended, Refused):
            if client.started:
                await client.break_off(ended.reply.body)
            elif ended.unjoined:
                # Nobody refused it, and the next pair of servers may serve it.
                await self._fail(503, "transfer_failed", message_of(self._call.ids.as_asked(ended.reply.body)))
            else:
                await client.whole(ended.reply)
        elif isinstance(ended, Lost):
            await self._fail(502, "upstream_lost", str(ended))
        elif isinstance(ended, Local):
            self._router.counts.rejected += 1
            await client.refuse(503, "no_connection", f"request {self._call.ids.name}: {ended}")
        else:
            self._router.counts.rejected += 1
            await client.refuse(503, "no_instance", f"no {self._router.pairs.missing()} server is healthy")

    async def _fail(self, status: int, kind: str, why: str) -> None:
        self._router.counts.failed += 1
        await self._client.refuse(status, kind, f"request {self._call.ids.name}: {why}")
