"""Tracebacks are found anywhere in a log, and those of SGLang's own bugs are recognized."""

from __future__ import annotations

from pathlib import Path

from faults import logs

OURS = """\
[2026-01-01 10:00:00] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 5, in run
    self.step()
  File "sglang_laps/slo.py", line 3, in record
    x / y
    ~~^~~
ZeroDivisionError: float division by zero

[2026-01-01 10:00:01] all is well
"""
THEIRS = """\
ERROR:    Exception in ASGI application
Traceback (most recent call last):
  File "fastapi/exceptions.py", line 217, in __str__
    message += repr(err)
RecursionError: maximum recursion depth exceeded while getting the repr of an object

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "fastapi/routing.py", line 3, in app
    raise
fastapi.exceptions.RequestValidationError: <exception str() failed>
INFO: go on
"""


def test_scan_finds_tracebacks_and_alarms(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("fine\n" + OURS)
    (tmp_path / "b.log").write_text(THEIRS + "Task exception was never retrieved\n")
    found = logs.scan([tmp_path / "a.log", tmp_path / "b.log", tmp_path / "none.log"])
    assert found.wrong == [
        'a.log: ZeroDivisionError: float division by zero (File "sglang_laps/slo.py", line 3, in record)',
        "a.log: [2026-01-01 10:00:00] Scheduler hit an exception: Traceback (most recent call last):",
        "b.log: Task exception was never retrieved",
    ]
    assert sum(found.own.values()) == 1, "one exception led to the other"


CHAINED = """\
[2026-01-01 10:00:00] PD rebootstrap prefill request failed for rid=1
Traceback (most recent call last):
  File "urllib3/util/connection.py", line 73, in create_connection
    sock.connect(sa)
ConnectionRefusedError: [Errno 111] Connection refused

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "sglang/srt/disaggregation/common/conn.py", line 1269, in _run_prefill_recompute
    response = self._get_prefill_recompute_session().post(
requests.exceptions.ConnectionError: Max retries exceeded
Traceback (most recent call last):
  File "a.py", line 1, in b
ValueError: another
"""


def test_chained_exceptions_count_once(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(CHAINED)
    found = logs.scan([tmp_path / "a.log"])
    assert found.wrong == ['a.log: ValueError: another (File "a.py", line 1, in b)']
    assert sum(found.own.values()) == 1


STOCK = """\
2026-01-01 10:00:00,1 ERROR asyncio: Task exception was never retrieved
future: <Task finished name='Task-9' coro=<_BaseRequestContextManager without __name__>()> exception=ServerError('x')>
Traceback (most recent call last):
  File "aiohttp/streams.py", line 716, in read
    await self._waiter
aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected
"""


def test_stock_minilb_traceback_is_not_reported_as_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(STOCK)
    found = logs.scan([tmp_path / "a.log"])
    assert (found.wrong, sum(found.own.values())) == ([], 1)


def test_log_without_tracebacks_has_no_findings(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("Error in request: no traceback\nprefill failed with exception KVTransferError\n")
    found = logs.scan([tmp_path / "a.log"])
    assert (found.wrong, found.own) == ([], {})
