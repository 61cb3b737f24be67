"""Settings of the router: division of a fleet, and number of servers for two pools."""

from __future__ import annotations

import pytest
from laps_core.config import ConfigError
from laps_core.pools.config import AllocConfig


def test_initial_short_or_paper_preset_divides_fleet_from_start() -> None:
    assert [c.divided for c in (AllocConfig(), AllocConfig(initial_short=1), AllocConfig(preset="paper"))] == [
        False,
        True,
        True,
    ]
    assert [c.short_of(5) for c in (AllocConfig(), AllocConfig(initial_short=1), AllocConfig(preset="paper"))] == [
        None,
        1,
        2,
    ]


def test_undivided_fleet_accepts_single_server() -> None:
    AllocConfig().check_instances(1)


@pytest.mark.parametrize(
    ("config", "prefill", "says"),
    [
        (AllocConfig(n_min=2), 4, None),
        (AllocConfig(n_min=2), 3, "n_min: 2 for each pool needs 4 --prefill, not 3"),
        (AllocConfig(preset="paper"), 2, None),
        (AllocConfig(preset="paper"), 1, "n_min: 1 for each pool needs 2 --prefill, not 1"),
        (AllocConfig(initial_short=2), 3, None),
        (AllocConfig(n_min=2, initial_short=2), 5, None),
        (AllocConfig(initial_short=3), 3, "initial_short: 3 must be from 1 to 2 with 3 --prefill and n_min 1"),
        (AllocConfig(n_min=2, initial_short=1), 5, "initial_short: 1 must be from 2 to 3"),
    ],
)
def test_check_instances_requires_enough_servers_for_two_pools(
    config: AllocConfig, prefill: int, says: str | None
) -> None:
    if says is None:
        config.check_instances(prefill)
        return
    with pytest.raises(ConfigError) as error:
        config.check_instances(prefill)
    assert says in str(error.value)
