"""One request on its way through the router: to pairs of servers until one has answered, and back to the client."""

from __future__ import annotations

import asyncio
import logging

from ..pools.pairs import Tried
from ..servers.upstream import Local, Lost
from .attempt import Attempt
from .call import Call
from .client import Client
from .faults import Refused, message_of
from .services import Services

logger = logging.getLogger(__name__)

Ended = Refused | Lost | Local
"""How an attempt failed."""


class Passage:
    """A request whose body has been read. ``run`` answers it, whatever happens."""

    def __init__(self, services: Services, call: Call, client: Client) -> None:
        self._services = services
        self._call = call
        self._client = client
        self._tried = Tried()
        self._deaths = 0
        """Servers that were lost with this request on them."""

    async def run(self) -> None:
        """Try on a pair of servers, and on others as far as --retry-* allow while nothing has been sent."""
        services, call, client = self._services, self._call, self._client
        call.read(services.counter)
        services.budget.earn()
        ended: Ended | None = None
        for n in range(services.retries.attempts):
            pair = services.pairs.choose(call.ask, self._tried)
            if pair is None:
                break
            if not n:
                services.journal.note_choice(pair[0], call.ask.total)
                call.length_class = pair[0].length_class
            try:
                attempt = Attempt(services, call, client, *pair, services.sessions.timeout(call.age_s) if n else None)
                await attempt.run()
                return
            except (Refused, Lost, Local) as e:
                ended = e
            except TimeoutError:
                logger.warning("%s timed out after %.0f s", call.ids.name, call.age_s)
                await self._fail(504, "timeout", f"request {call.ids.name}: timed out")
                return
            if isinstance(ended, Refused) and ended.unjoined:
                self._tried.ways.add((pair[0].instance, pair[1]))
            else:
                self._tried.servers.add(ended.instance)
            again = await self._worth_another(ended)
            again = again and not (client.started or attempt.held.asked) and n + 1 < services.retries.attempts
            if again or not isinstance(ended, Refused):
                logger.warning("%s %s%s", call.ids.name, ended, "; trying another" if again else "")
            if not again:
                break
            services.journal.counts.retried += 1
            await asyncio.sleep(services.retries.pause_s(n))
        await self._conclude(ended)

    async def _worth_another(self, ended: Ended) -> bool:
        """Whether another pair may do better; what is learnt of the server is noted."""
        services = self._services
        if isinstance(ended, Local):
            ended.instance.rest()
            return not ended.exhausted
        if isinstance(ended, Refused):
            # Pairs that cannot be joined are to be left even for one that has no room at the moment.
            left = ended.elsewhere and services.pairs.left(self._tried, now=not ended.unjoined)
            return left and services.budget.spend()
        shared = not ended.sent or ended.instance.note_lost()
        services.health.lost(ended.instance, ended.kind)
        if not ended.sent:
            return True
        # What kills servers kills the one it came to. Who was there alone when it died is not sent to the next; who
        # was there with others is, once.
        self._deaths += 1
        if self._deaths > 1:
            return False
        return shared or ended.kind == "cut" or not await services.health.refuses(ended.instance)

    async def _conclude(self, ended: Ended | None) -> None:
        """Answer with how the last attempt ended; None: there was nowhere to go."""
        services, client, name = self._services, self._client, self._call.ids.name
        if isinstance(ended, Refused):
            if client.started:
                await client.break_off(ended.reply.body)
            elif ended.unjoined:
                # Nobody refused it, and the next pair of servers may serve it.
                told = message_of(self._call.ids.as_asked(ended.reply.body))
                await self._fail(503, "transfer_failed", f"request {name}: {told}")
            else:
                await client.whole(ended.reply)
        elif isinstance(ended, Lost):
            await self._fail(502, "upstream_lost", f"request {name}: {ended}")
        elif isinstance(ended, Local):
            services.journal.counts.rejected += 1
            await client.refuse(503, "no_connection", f"request {name}: {ended}")
        else:
            services.journal.counts.rejected += 1
            await client.refuse(503, "no_instance", f"no {services.pairs.missing()} server is healthy")

    async def _fail(self, status: int, kind: str, message: str) -> None:
        self._services.journal.counts.failed += 1
        await self._client.refuse(status, kind, message)
