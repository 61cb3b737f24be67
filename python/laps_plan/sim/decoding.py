"""Servers that decode, with or without prefill in the same process, and the balancer in front of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from laps_plan.sim.device import Device
from laps_plan.sim.engine import Events, Server
from laps_plan.sim.fleet import LeastLoad, Plain
from laps_plan.sim.request import Batch, Request
from laps_plan.sim.stock import AtOnce, Scheduler
from laps_plan.sim.streams import Streams, TokenLog


class DecodingServer(Server):
    """A server that decodes its requests after the first token. It runs the overlap loop."""

    def __init__(self, name: str, scheduler: Scheduler, device: Device, events: Events) -> None:
        super().__init__(name, scheduler, device, events, overlap=True)
        self.log = TokenLog()

    def take(self, now: float, request: Request) -> None:
        """Accept for decoding a request whose prompt another server has computed."""
        self._ready(now, request)

    def _reply(self, reply: float, batch: Batch) -> None:
        for r in batch.ending:
            r.first_s = reply
            self.answered(reply, r)
            if r.output <= 1:
                self._over(reply, r)
        if batch.streams:
            self.log.step(reply, batch.streams, batch.context)
            for r in batch.last:
                self._over(reply, r)

    def _over(self, reply: float, request: Request) -> None:
        self.log.requests.append(request)
        self.ended(reply, request)


class DecodeOnly(AtOnce):
    """The scheduler of a server that only decodes."""

    def __init__(self, device: Device) -> None:
        self._device, self._joining = device, list[Request]()
        self._streams = Streams()
        self.waiting_tokens = 0

    def add(self, request: Request, now: float) -> None:
        self._joining.append(request)

    def next(self, now: float) -> Batch | float | None:
        self._streams.join(self._joining)
        self._joining = []
        return decode_step(self._streams, self._device)

    def finished(self, batch: Batch, now: float) -> None:
        """See stock.Scheduler."""


def decode_step(streams: Streams, device: Device) -> Batch | None:
    """Return a decode step of all streams; None if there are no streams."""
    if not streams.count:
        return None
    batch = streams.step(Batch([], []))
    batch.seconds = device.seconds(batch)
    return batch


class PrefillServer(Server):
    """A server that hands its requests over to decode servers."""

    hand_over: Callable[[float, Request], None]

    def _reply(self, reply: float, batch: Batch) -> None:
        for r in batch.ending:
            r.first_s = reply
            self.answered(reply, r)
            self.hand_over(reply, r)


class Disaggregated(Plain):
    """Prefill servers behind a plain balancer, and decode servers. Each request goes to the decode server with the
    fewest streams; its transfer takes no time."""

    def __init__(self, prefill: Sequence[PrefillServer], decode: Sequence[DecodingServer], events: Events) -> None:
        super().__init__([*prefill, *decode])
        self._front = LeastLoad(prefill)
        self._decode = list(decode)
        self._load = [0] * len(decode)
        self._where: dict[int, int] = {}
        self._events = events
        for server in prefill:
            server.hand_over = self._prefilled

    def send(self, now: float, request: Request) -> None:
        self._front.send(now, request)

    def answered(self, now: float, request: Request) -> None:
        where = self._where.pop(request.number, None)
        if where is not None:
            self._load[where] -= 1

    def _prefilled(self, now: float, request: Request) -> None:
        self._front.answered(now, request)
        if request.output <= 1:
            self._decode[0].log.requests.append(request)
            self._decode[0].ended(now, request)
            return
        i = self._load.index(min(self._load))
        self._where[request.number] = i
        self._load[i] += 1
        self._events.at(now, self._decode[i].take, request)
