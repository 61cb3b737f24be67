"""A room that is cleared between a worker's two looks at it has failed."""

from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager


class Vanishing(dict[int, int]):
    """Whoever finds a room has it cleared right afterwards."""

    def __contains__(self, room: object) -> bool:
        found = super().__contains__(room)
        self.clear()
        return found


def make_manager(rooms: dict[int, int]) -> Any:
    manager = object.__new__(CommonKVManager)
    manager.request_status = rooms
    return manager


def test_room_cleared_between_two_looks() -> None:
    manager = make_manager(Vanishing({7: KVPoll.Success}))
    assert 7 in manager.request_status
    assert manager.check_status(7) == KVPoll.Failed


def test_other_rooms_are_as_they_were() -> None:
    assert make_manager({7: KVPoll.Transferring}).check_status(7) == KVPoll.Transferring
