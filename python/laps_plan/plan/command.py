"""``laps-plan``: predict what LAPS would gain for given traffic on a given device, before anything is installed.

    laps-plan trace.jsonl --servers 4 --ttft-ms 400,4000
    laps-plan --mix "95% lmsys:256, 5% log:1024-8192" --load 0.7
    laps-plan trace.jsonl --colocated --tbt-ms 100      servers that also decode
    laps-plan --replay http://prefill:30000             the last minute of that server under other policies

Everything is simulated, on this machine, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from laps_plan import asking, profile
from laps_plan.plan import colocated, page, whole, words
from laps_plan.plan.answer import answer, total
from laps_plan.plan.setup import Question
from laps_plan.plan.trials import Trials
from laps_plan.profile import Profile
from laps_plan.replay import command as replays
from laps_plan.traffic import files, mixed
from laps_plan.traffic.given import Traffic, poisson

DEVICE = "h200-qwen3-8b"
LOAD = 0.7
"""Load of a mix without --rate and --load."""
ANSWERS = "100% log:32-512"
WHOLE = 2000
"""Maximum requests per server if whole answers are simulated."""
FEWEST = 60
"""Minimum requests for an answer."""
MOST_RATE, MOST_YEARS = 10_000.0, 100
"""Maximum requests per second, and maximum span of all requests."""
YEAR_S = 365.25 * 86400
T = TypeVar("T", Trials, whole.Trials)


def positive(text: str) -> float:
    """Return a finite number above 0. Raises ArgumentTypeError or ValueError."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number > 0")
    return value


def count(text: str) -> int:
    """Return a whole number above 0. Raises ArgumentTypeError or ValueError."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number >= 1")
    return value


def objective(text: str) -> tuple[float, float]:
    """Return (short, long) in seconds, from one number or two numbers in milliseconds."""
    values = [positive(part) / 1e3 for part in text.split(",")]
    if len(values) > 2:
        raise argparse.ArgumentTypeError(f"{text} is not MS or SHORT_MS,LONG_MS")
    return values[0], values[-1]


def parser() -> argparse.ArgumentParser:
    assert __doc__
    what, _, examples = __doc__.partition("\n\n")
    made = argparse.ArgumentParser(
        "laps-plan", description=what, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    traffic = made.add_argument_group("traffic")
    one = traffic.add_mutually_exclusive_group(required=True)
    one.add_argument("file", nargs="?", type=Path, help=f"recorded traffic, also .gz: {', '.join(files.FORMATS)}")
    one.add_argument("--mix", metavar="TEXT", help=f'such as "95%% lmsys:256, 5%% log:1024-8192"; {mixed.KINDS}')
    one.add_argument(
        "--from",
        dest="url",
        metavar="URL",
        help=f"the lengths that this LAPS server or router counted (key: {asking.KEY})",
    )
    one.add_argument(
        "--replay",
        metavar="URL|FILE",
        help="requests of this LAPS server, or of a recording, under other policies; ignores most flags",
    )
    traffic.add_argument(
        "--format", choices=list(files.FORMATS), help="format of the file (recognised by its first line)"
    )
    traffic.add_argument("--requests", type=count, default=100_000, metavar="N", help="use at most N requests (100000)")
    traffic.add_argument("--newest", action="store_true", help="use the newest requests of the file, not the first")
    scaled = traffic.add_mutually_exclusive_group()
    scaled.add_argument("--rate", type=positive, metavar="R", help="scale the times to R requests per second")
    scaled.add_argument("--load", type=positive, metavar="X", help="scale the times to X times the servers' capacity")
    asked = made.add_argument_group("question")
    known = ", ".join(profile.names())
    asked.add_argument("--profile", default=DEVICE, help=f"profile of the servers: {known}, or a .json ({DEVICE})")
    asked.add_argument("--servers", type=count, default=1, metavar="N", help="prefill servers (1)")
    asked.add_argument(
        "--ttft-ms",
        type=objective,
        default=(0.4, 4.0),
        metavar="SHORT[,LONG]",
        help="objective for the first token (400,4000)",
    )
    asked.add_argument(
        "--ranks", type=count, metavar="N", help="data-parallel attention ranks of each server (as the profile says)"
    )
    asked.add_argument("--colocated", action="store_true", help="servers that prefill and decode")
    asked.add_argument("--tbt-ms", type=positive, default=100.0, metavar="MS", help="time between tokens (100)")
    asked.add_argument(
        "--answers",
        default=ANSWERS,
        metavar="TEXT",
        help="tokens of answers, as for --mix, if the traffic has none (log:32-512)",
    )
    asked.add_argument(
        "--kv-tokens",
        type=count,
        default=400_000,
        metavar="N",
        help="tokens of context that a server's memory holds (400000)",
    )
    asked.add_argument("--chunk", type=count, default=8192, metavar="TOKENS", help="--chunked-prefill-size (8192)")
    replayed = made.add_argument_group("replay")
    replayed.add_argument("--seconds", type=positive, default=60.0, help="replay the server's last SECONDS (60)")
    replayed.add_argument("--json", action="store_true", help="print JSON, with each request")
    replayed.add_argument("--record", type=Path, metavar="FILE", help="save the recording, which is also a trace")
    made.add_argument("--seed", type=int, default=0, help="seed of random choices (0)")
    made.add_argument(
        "--out", type=Path, default=Path("laps-plan"), metavar="DIR", help="folder for the page and JSON (laps-plan)"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 2, and print one line, if the input cannot be used."""
    made = parser()
    args = made.parse_args(argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe; without this, flushing stdout at exit would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(args: argparse.Namespace) -> int:
    if args.replay is not None:
        return replays.run(args.replay, args.seconds, as_json=args.json, record=args.record)
    # A server's environment lacks some of these.
    missing = next((name for name in ("matplotlib", "tabulate", "tqdm") if find_spec(name) is None), None)
    if missing is not None:
        print(f"laps-plan: {missing} is missing: pip install 'sglang-laps[plan]'", file=sys.stderr)
        return 2
    try:
        simulate = _colocated(args) if args.colocated else _prefill(args)
    except (ValueError, OSError, SystemExit) as e:
        print(f"laps-plan: {e}", file=sys.stderr)
        return 2
    simulate()
    return 0


def _prefill(args: argparse.Namespace) -> Callable[[], None]:
    """Return the simulation of prefill servers. Raises ValueError, OSError or SystemExit if the input is unusable."""
    device = Profile.load(args.profile)
    device = device if args.ranks is None else device.with_ranks(args.ranks)
    short_s, long_s = args.ttft_ms
    question = Question(device, args.servers, short_s, long_s, args.chunk)
    trials = _trials(partial(Trials, question), _read(args), args)
    _create(args.out, ("index.html", "plan.json"))
    return partial(_simulate_prefill, trials, args.out)


def _simulate_prefill(trials: Trials, out: Path) -> None:
    from tqdm import tqdm

    minutes = total(trials) * trials.request_s / 60.0
    if minutes > 1.0:
        print(f"laps-plan: long prompts: this takes about {minutes:.0f} minutes", file=sys.stderr)
    with tqdm(total=total(trials), unit=" requests", unit_scale=True, disable=None) as bar:
        trials.tell = bar.update
        found = answer(trials)
        bar.update(max(0, int(bar.total or 0) - bar.n))
    (out / "index.html").write_text(page.page(found), encoding="utf-8")
    (out / "plan.json").write_text(page.as_json(found), encoding="utf-8")
    print(words.text(found), end="")
    print(f"\nPage and JSON: {out / 'index.html'}, {out / 'plan.json'}")


def _colocated(args: argparse.Namespace) -> Callable[[], None]:
    """Return the simulation of servers that also decode. Raises the errors of ``_prefill``."""
    device = Profile.load(args.profile)
    device.decode_s(1, 1)
    short_s, long_s = args.ttft_ms
    question = whole.Question(device, args.servers, short_s, long_s, args.tbt_ms / 1e3, args.kv_tokens)
    given = _read(args).cut(WHOLE * args.servers, newest=args.newest)
    given = whole.with_answer_lengths(given, mixed.by_hand(args.answers), args.seed)
    most = max(job.new + job.cached + job.output for job in given.jobs)
    if most > args.kv_tokens:
        raise ValueError(f"--kv-tokens: a server holds {args.kv_tokens:,}, one request needs {most:,}")
    trials = _trials(partial(whole.Trials, question), given, args)
    _create(args.out, ("plan.json",))
    return partial(_simulate_colocated, trials, args.out)


def _simulate_colocated(trials: whole.Trials, out: Path) -> None:
    from tqdm import tqdm

    with tqdm(unit=" simulations", disable=None) as bar:

        def tell(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        trials.tell = tell
        found = colocated.answer(trials)
    (out / "plan.json").write_text(json.dumps(colocated.as_dict(found), indent=1) + "\n")
    print(colocated.text(found), end="")
    print(f"\nJSON: {out / 'plan.json'}")


def _create(out: Path, names: Sequence[str]) -> None:
    """Create the files where missing. Raises OSError before the simulation, not after it, if one cannot be written."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        (out / name).open("a").close()


def _read(args: argparse.Namespace) -> Traffic:
    if args.file is not None:
        traffic = files.read(args.file, args.format, args.seed).cut(args.requests, newest=args.newest)
    elif args.mix is not None:
        traffic = poisson(mixed.by_hand(args.mix), args.requests, args.mix, seed=args.seed, timed=False)
    else:
        lengths, rate, n = mixed.ask(args.url)
        traffic = poisson(lengths, args.requests, f"as {args.url} has counted {n:,}", rate=rate, seed=args.seed)
    if len(traffic.jobs) < FEWEST:
        raise ValueError(f"{len(traffic.jobs)} requests are too few: at least {FEWEST}")
    return traffic


def _trials(make: Callable[[Traffic], T], traffic: Traffic, args: argparse.Namespace) -> T:
    """Return the trials that `make` makes of the traffic, at the rate or load that was asked for. Raises ValueError for
    a file without times if neither was asked for."""
    trials, rate, load = make(traffic), args.rate, args.load
    if rate is None and load is None:
        if traffic.timed:
            _require_plausible_times(traffic)
            return trials
        if args.mix is None:
            raise ValueError(f"{args.file} has no times: give --rate or --load")
        load = LOAD
    scaled = trials.traffic.at_rate(rate or load * trials.capacity * args.servers)
    _require_plausible_times(scaled)
    return make(scaled)


def _require_plausible_times(traffic: Traffic) -> None:
    """Raise ValueError for times in another unit: a search for servers would not end, and rounding would be seconds."""
    if traffic.rate > MOST_RATE:
        raise ValueError(f"{traffic.rate:,.0f} requests per second: more than {MOST_RATE:,.0f} are not simulated")
    years = (traffic.jobs[-1].at_s - traffic.jobs[0].at_s) / YEAR_S
    if years > MOST_YEARS:
        raise ValueError(f"the requests span {years:,.0f} years: more than {MOST_YEARS} are not simulated")
