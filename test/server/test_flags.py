"""LAPS flags on SGLang's own command line; without them SGLang stays unchanged."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import pytest
import warm
from served import make_checkpoint
from sglang_laps import compat, plugin

PARSE = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
base = ["--model-path", "nowhere", "--device", "cpu", "--disaggregation-mode", "prefill"]
os.dup2(1, 2)
for argv in json.loads(sys.argv[1]):
    for name in ("SGLANG_LAPS_SCHEDULER", "SGLANG_LAPS_EMULATE"):
        os.environ.pop(name, None)
    print("##", argv, flush=True)
    try:
        prepare_server_args(base + argv)
        print("ok", os.environ.get("SGLANG_LAPS_SCHEDULER", "")[:1], flush=True)
    except SystemExit as e:
        print("exit", e.code, flush=True)
"""
ON = "--enable-laps-scheduler"
TWO_PROCESSES = "ok {" if compat.release().takes_http_app else "error: --tokenizer-worker-num: only 1 on SGLang"
CASES: list[tuple[list[str], str]] = [
    ([ON], "ok {"),
    ([ON, "--laps-length-threshold", "auto", "--laps-wait-window-ms", "0", "--laps-ttft-slo-ms", "400"], "ok {"),
    ([ON, "--laps-length-threshold", "0"], "error: --laps-length-threshold: 0 is not"),
    ([ON, "--laps-length-threshold", "-1"], "error: --laps-length-threshold: -1 is not"),
    ([ON, "--laps-length-basis", "words"], "error: --laps-length-basis"),
    ([ON, "--laps-wait-window-ms", "-1"], "error: --laps-wait-window-ms"),
    ([ON, "--laps-wait-max-batch", "0"], "error: --laps-wait-max-batch"),
    ([ON, "--laps-ttft-slo-ms", "soon"], "error: --laps-ttft-slo-ms"),
    ([ON, "--laps-config", '{"nonsense": 1}'], "error: --laps-config: unknown key 'nonsense'"),
    ([ON, "--laps-config", '{"guard": 2}'], "error: --laps-config: guard: 2 is not from 0 to 1"),
    ([ON, "--laps-config", '{"slice_ms": -1}'], "error: --laps-config: slice_ms: -1 is not"),
    ([ON, "--laps-config", '{"long_share": 0.5}'], "error: --laps-config: unknown key 'long_share'"),
    ([ON, "--page-size", "64", "--laps-config", '{"preempt_overhead": 0.3, "slice_ms": 0}'], "ok {"),
    ([ON, "--disaggregation-mode", "decode"], "LAPS scheduler is off: --disaggregation-mode is decode, not prefill"),
    ([ON, "--disaggregation-mode", "null"], "ok {"),
    ([ON, "--disaggregation-mode", "null", "--laps-tbt-ms", "100"], "ok {"),
    ([ON, "--laps-tbt-ms", "-1"], "error: --laps-tbt-ms: -1 is not"),
    ([ON, "--pp-size", "2"], "ok {"),
    ([ON, "--pp-size", "2", "--enable-dynamic-chunking"], "error: --enable-laps-scheduler: --enable-dynamic-chunking"),
    ([ON, "--pp-size", "2", "--attn-dp-size", "2"], "error: --enable-laps-scheduler: data-parallel attention with"),
    ([ON, "--enable-prefill-delayer"], "error: --enable-laps-scheduler: --enable-prefill-delayer (or"),
    ([ON, "--enable-pd-role-switch"], "error: --enable-laps-scheduler: --enable-pd-role-switch cannot"),
    ([ON, "--admin-api-key", "x", "--tokenizer-worker-num", "2"], "error: --"),
    ([ON, "--admin-api-key", "x"], "ok {"),
    ([ON, "--tokenizer-worker-num", "2"], TWO_PROCESSES),
    ([ON, "--smg-grpc-mode"], "ok {"),
    (["--laps-length-threshold", "9"], "--laps-length-threshold given without --enable-laps-scheduler: ignored"),
    (["--laps-emulate", "h200-qwen3-8b,slow=2"], "EMULATED DEVICE: step times of h200-qwen3-8b"),
    (["--laps-emulate", "h9000"], "error: --laps-emulate: no profile h9000"),
    (["--laps-emulate", "h200-qwen3-8b,slow=0.5"], "error: --laps-emulate: 'h200-qwen3-8b,slow=0.5' is not"),
    (["--laps-emulate", "cpu", "--disaggregation-mode", "decode"], "error: --laps-emulate: --disaggregation-mode is"),
    ([], "ok \n"),
]


def run(code: str, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, in which no plugin is loaded yet."""
    return warm.SGLANG.run("-c", code, *argv, env=env)


def launch(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a user's command line."""
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=500, check=False)


@pytest.fixture(scope="module")
def answers() -> list[str]:
    done = run(PARSE, json.dumps([argv for argv, _ in CASES]))
    parts = (done.stdout + "\n").split("## ")[1:]
    assert len(parts) == len(CASES), done.stdout[-2000:] + done.stderr[-2000:]
    return parts


@pytest.mark.parametrize("i", range(len(CASES)), ids=[" ".join(argv) or "nothing" for argv, _ in CASES])
def test_command_line_is_accepted_or_refused_with_reason(answers: list[str], i: int) -> None:
    says = CASES[i][1]
    assert says in answers[i]
    if says.startswith("error"):
        assert "exit 2" in answers[i]
        assert answers[i].count("error:") == 1
    else:
        assert "ok " in answers[i]
        on = "ok {" in answers[i]
        assert on == says.startswith("ok {")


@pytest.mark.parametrize(
    ("release", "key", "says"),
    [
        ("0.5.22", None, "--tokenizer-worker-num: only 1 on SGLang"),
        ("0.5.23", "x", "--admin-api-key: SGLang checks it only with"),
        ("0.5.23", None, ""),
    ],
)
def test_several_http_processes_are_refused_where_they_lack_laps(
    release: str, key: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "release", lambda: compat.RELEASES[release])
    one, two = (argparse.Namespace(tokenizer_worker_num=n, admin_api_key=key) for n in (1, 2))
    assert plugin._conflict_of_processes(one) is None
    assert (plugin._conflict_of_processes(two) or "").startswith(says)


@pytest.mark.parametrize(
    ("flags", "rust", "other"),
    [({}, "0", None), ({}, "1", "SGLANG_RUST_SERVER"), ({"grpc_mode": True}, "0", "--smg-grpc-mode")],
)
def test_servers_that_lack_laps_are_named(
    flags: dict[str, bool], rust: str, other: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", rust)
    assert plugin._other_server(argparse.Namespace(**flags)) == other


def test_warning_names_what_server_lacks(answers: list[str]) -> None:
    warned = [argv for (argv, _), answer in zip(CASES, answers, strict=True) if "LAPS with --smg-grpc-mode:" in answer]
    assert warned == [[ON, "--smg-grpc-mode"]]


def test_invalid_value_stops_launch_before_model_loads() -> None:
    done = launch(
        "-m", "sglang.launch_server", "--model-path", "nowhere", "--disaggregation-mode", "prefill", ON,
        "--laps-length-threshold", "0",
    )  # fmt: skip
    assert done.returncode == 2
    assert "sglang-laps: error: --laps-length-threshold: 0 is not" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("entry", [("-m", "sglang.launch_server"), ("-m", "sglang.cli.main", "serve")])
def test_help_lists_laps_flags(entry: tuple[str, ...]) -> None:
    if "sglang.cli.main" in entry:
        entry = ("-c", "import sys; sys.argv[0] = 'sglang'; from sglang.cli.main import main; main()", "serve")
        done = launch(*entry, "--help")
    else:
        done = warm.SGLANG.run(*entry, "--help")
    assert "LAPS:" in done.stdout
    for flag in (ON, "--laps-length-threshold", "--laps-length-basis", "--laps-config", "--laps-wait-window-ms"):
        assert flag in done.stdout


RESOLVE = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.server_args import prepare_server_args
folder, mode, declared = sys.argv[1], sys.argv[2], eval(sys.argv[3])
argv = ["--model-path", folder, "--device", "cpu", "--disaggregation-mode", mode, "--enable-laps-scheduler"]
args = prepare_server_args(argv)
if declared:
    declare_resolution(args, "a model", **declared)
args.resolve_once()
print("resolved")
"""
DELAYER = {"SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE": "1"}


@pytest.mark.parametrize(
    ("mode", "declared", "env", "says"),
    [
        ("prefill", {}, DELAYER, "--enable-prefill-delayer (or SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE) cannot"),
        ("prefill", {"attn_dp_size": 2, "pp_size": 2}, {}, "data-parallel attention with --pp-size > 1"),
        ("decode", {}, DELAYER, None),
    ],
)
def test_conflict_from_model_or_environment_is_refused(
    mode: str, declared: dict[str, int], env: dict[str, str], says: str | None
) -> None:
    # A model sets the conflict; the group's size must match.
    more = {"tp_size": 2} if declared else {}
    done = run(RESOLVE, str(make_checkpoint()), mode, repr(declared | more), **env)
    if says is None:
        assert (done.returncode, done.stdout.split()[-1:]) == (0, ["resolved"]), done.stderr[-2000:]
    else:
        assert done.returncode == 2, done.stderr[-2000:]
        assert f"sglang-laps: error: --enable-laps-scheduler: {says}" in done.stderr
        assert "Traceback" not in done.stderr


SCHEDULER = """
import sglang.srt.managers.scheduler as module
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.model_executor.model_runner import ModelRunner
# In a list: a replacement is put wherever a module holds the class under a name.
stock, before = [module.Scheduler], {k: id(v) for k, v in vars(ModelRunner).items()}
from sglang.srt.plugins import load_plugins
load_plugins()
print("stock" if module.Scheduler is stock[0] else module.Scheduler.__mro__[:3])
print("runner", before == {k: id(v) for k, v in vars(ModelRunner).items()})
"""


def test_scheduler_and_runner_are_stock_if_laps_is_off() -> None:
    done = run(SCHEDULER, SGLANG_LAPS_SCHEDULER="")
    assert "stock" in done.stdout.splitlines(), done.stderr[-2000:]
    assert "runner True" in done.stdout


def test_environment_variable_enables_laps_scheduler() -> None:
    done = run(SCHEDULER, SGLANG_LAPS_SCHEDULER='{"guard": 0.5}')
    assert "LapsScheduler" in done.stdout, done.stderr[-2000:]


def test_unsupported_sglang_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_laps import compat, seams

    assert seams.wrong_release() is None
    monkeypatch.setattr(compat, "installed", lambda: "0.5.21")
    assert "supports sglang 0.5.22 and 0.5.23; found 0.5.21" in str(seams.wrong_release())


def test_host_platform_flushes_denormals() -> None:
    import torch
    from sglang.srt.platforms import current_platform

    assert type(current_platform).__name__ == "HostPlatform"
    try:
        current_platform.init_backend()
        assert (torch.full((8,), 1e-40) * 1.0).count_nonzero() == 0
    finally:
        torch.set_flush_denormal(False)


def test_host_platform_replaces_nccl_only_on_old_release(monkeypatch: pytest.MonkeyPatch) -> None:
    from laps_emulate.host import corrections
    from sglang.srt.distributed.device_communicators import pynccl
    from sglang_laps import compat

    stock: Any = object()
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", stock)
    monkeypatch.setattr(compat, "release", lambda: compat.RELEASES["0.5.23"])
    corrections.group_without_nccl()
    assert pynccl.PyNcclCommunicator is stock
    monkeypatch.setattr(compat, "release", lambda: compat.RELEASES["0.5.22"])
    corrections.group_without_nccl()
    assert pynccl.PyNcclCommunicator(group=None, device="cpu") is None


def test_waiting_receive_polls_socket_only_if_nonblocking() -> None:
    from laps_emulate.host.corrections import POLL_MS, Waiting

    did: list[object] = []

    class Socket:
        def poll(self, timeout_ms: int) -> None:
            did.append(timeout_ms)

    def receive(socket: Socket, flags: int) -> str:
        did.append(flags)
        return "one"

    assert Waiting(receive)(Socket()) == "one"
    assert did == [0], "who waits for a message anyway waits in the call itself"
    assert Waiting(receive)(Socket(), flags=1) == "one"
    assert did[1:] == [POLL_MS, 1]


def test_dp_controller_receive_is_wrapped_once() -> None:
    """The module of the controller is patched once, when it is imported."""
    from types import SimpleNamespace

    from laps_emulate.host import corrections

    module = SimpleNamespace(sock_recv=len)
    before = sys.modules.get(corrections.CONTROLLER)
    sys.modules[corrections.CONTROLLER] = module  # type: ignore[assignment]
    try:
        for _ in range(2):
            corrections.let_the_controller_wait()
        assert isinstance(module.sock_recv, corrections.Waiting)
        assert module.sock_recv._receive is len
    finally:
        sys.modules.pop(corrections.CONTROLLER)
        if before is not None:
            sys.modules[corrections.CONTROLLER] = before
