"""Help texts name what replaces the deprecated --enable-dp-attention, and until when it works."""

import argparse

import pytest
from sglang.srt.server_args import ServerArgs


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {flag: action.help or "" for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--enable-dp-attention", "after 2026-12-31"),
        ("--enable-dp-attention", "--attn-dp-size"),
        ("--dp-size", "--attn-dp-size"),
        ("--attn-dp-size", "--enable-dp-attention"),
    ],
)
def test_flag_names(helps: dict[str, str], flag: str, named: str) -> None:
    assert named in helps[flag]
