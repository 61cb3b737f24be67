"""Plugin of SGLang's processes on the host platform: the flag for an emulated device, and the device itself."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from laps_core.config import ConfigError
from sglang_laps import options, seams, transfers
from sglang_laps.seams import wrong_release
from sglang_laps.support import refuse

from laps_emulate import spec
from laps_emulate.host.corrections import let_the_controller_wait
from laps_emulate.seams import SEAMS

logger = logging.getLogger(__name__)

SCHEDULER = "sglang.srt.managers.scheduler"


def load() -> None:
    """Register the hooks of this process."""
    try:
        _load()
    except Exception as e:
        # SGLang would only log the error, and serve with this machine's own step times.
        if os.environ.get(spec.ENV, "").strip():
            refuse(f"{spec.ENV}: {type(e).__name__}: {e}")
        raise


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Add --laps-emulate to SGLang's command line."""
    group = parser.add_argument_group("LAPS without a GPU")
    text = "Step times of a profile instead of this machine's; see docs/PLANNING.md."
    group.add_argument(spec.FLAG, metavar="PROFILE[,slow=K]", help=text)


def emulate(args: argparse.Namespace) -> None:
    """Make the processes started from here emulate a device, if the command line (or the environment) asks for it.

    Raises ConfigError.
    """
    text = options.typed(args, spec.FLAG)
    found = spec.from_env() if text is None else spec.DeviceSpec.parse(text)
    if found is None:
        return
    if wrong := wrong_release() or found.why_not(args):
        raise ConfigError(f"{spec.FLAG}: {wrong}")
    logger.warning(found.warning())
    spec.to_env(found)


def _load() -> None:
    seams.hook("server_args.ServerArgs.add_cli_args", options.with_flags(add_flag), "AFTER", SEAMS)
    seams.hook("server_args.ServerArgs.from_cli_args", options.read_first(_prepare), "BEFORE", SEAMS)
    # Importing the scheduler takes seconds: only a process that runs a scheduler has imported it.
    if SCHEDULER not in sys.modules:
        return
    try:
        found, laps = spec.from_env(), options.from_env()
    except ConfigError as e:
        refuse(e)
    if wrong := wrong_release():
        if found is not None:
            refuse(wrong)
        return
    let_the_controller_wait()
    if laps is None:
        transfers.hook_races()  # for stock servers too: a comparison with a server that hangs shows nothing
    if found is not None:
        from laps_emulate.install import install

        seams.require(SEAMS)
        install(found)


def _prepare(args: argparse.Namespace) -> None:
    emulate(args)
    # SGLang asks a platform for its device before its defaults, and needs a device name then.
    if getattr(args, "device", None) is None:
        args.device = "cpu"
