"""Races between the threads that share SGLang's transfer state, and their fixes."""

from __future__ import annotations

import subprocess

import warm


def run(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, in which no plugin is loaded yet."""
    return warm.SGLANG.run("-c", PLATFORM + code, env=env)


ON, OFF = {"SGLANG_LAPS_SCHEDULER": "1"}, {"SGLANG_LAPS_SCHEDULER": ""}
STOCK = {**OFF, "ELSEWHERE": "1"}
"""Environment of stock SGLang on another platform, because ours fixes the transfers of every server."""
PLATFORM = """
import os
import sglang.srt.managers.scheduler, sglang.srt.platforms
if "ELSEWHERE" in os.environ:
    sglang.srt.platforms.current_platform = object()
"""
TRANSFER_THREAD = """
from concurrent.futures import ThreadPoolExecutor
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager as Manager
from sglang.srt.plugins import load_plugins
load_plugins()
manager = Manager.__new__(Manager)
manager.request_status = {7: "there"}
with ThreadPoolExecutor(1) as thread:
    for room in 7, 8:
        try:
            print("thread", room, thread.submit(manager.check_status, room).result())
        except KeyError:
            print("thread", room, "ended")
try:
    manager.check_status(8)
except KeyError:
    print("scheduler told")
"""


def test_transfer_thread_survives_removal_of_transfer() -> None:
    on, off, stock = (run(TRANSFER_THREAD, env).stdout for env in (ON, OFF, STOCK))
    assert "thread 7 there" in on
    assert "thread 8 0" in on, on  # KVPoll.Failed
    assert "scheduler told" in on
    assert off == on
    assert "thread 8 ended" in stock


ROOMS = """
from types import SimpleNamespace
from sglang.srt.disaggregation.common.conn import CommonKVManager as Manager
from sglang.srt.plugins import load_plugins
def books(self, args, disaggregation_mode, server_args, is_mla_backend=False):
    self.transfer_infos = {}
Manager.__init__ = books
import sglang.srt.managers.scheduler
load_plugins()
manager = SimpleNamespace()
Manager.__init__(manager, None, None, None)
rooms = manager.transfer_infos
rooms[7] = {}
rooms.pop(7)
try:
    rooms[7]["a decode server"] = "its word"
    print("heard", rooms, rooms.pop(8))
except KeyError:
    print("ended")
"""


def test_decode_message_thread_survives_concurrent_abort() -> None:
    on, off, stock = (run(ROOMS, env) for env in (ON, OFF, STOCK))
    assert "heard {7: {'a decode server': 'its word'}} None" in on.stdout, on.stderr[-2000:]
    assert off.stdout == on.stdout
    assert "ended" in stock.stdout, stock.stderr[-2000:]


TWO_WRITERS = """
import threading
from types import SimpleNamespace
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager as Manager
from sglang.srt.plugins import load_plugins
load_plugins()
opened, heard = threading.Event(), threading.Event()
class Slow(dict):
    def get(self, room, default=None):  # whoever opens the room is interrupted between reading and writing
        found = super().get(room, default)
        if threading.current_thread() is threading.main_thread():
            opened.set()
            heard.wait(60.0 if "ELSEWHERE" in os.environ else 1.0)  # where a lock is held, nobody is heard
        return found
manager = SimpleNamespace(
    request_status=Slow(), deferred_bootstrap=None, _deferred_ack_targets={}, _deferred_ack_poisoned_rooms=set(),
    _staging_outstanding={},
)
def listen():
    opened.wait()
    Manager.update_status(manager, 7, KVPoll.WaitingForInput)
    heard.set()
listener = threading.Thread(target=listen)
listener.start()
Manager.update_status(manager, 7, KVPoll.Bootstrapping)
listener.join()
print("status", manager.request_status[7])
"""


def test_decode_status_survives_opening_of_bootstrap_room() -> None:
    on, off, stock = (run(TWO_WRITERS, env) for env in (ON, OFF, STOCK))
    assert "status 2" in on.stdout, on.stdout + on.stderr[-2000:]  # KVPoll.WaitingForInput
    assert off.stdout == on.stdout
    assert "status 1" in stock.stdout, stock.stderr[-2000:]
