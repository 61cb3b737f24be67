"""``sgl.Engine`` with the environment variable set: a server that prefills and decodes, without HTTP."""

from __future__ import annotations

from pathlib import Path

import warm
from served import make_checkpoint

ENGINE = """
import sys
import sglang as sgl
import sglang.srt.managers.scheduler  # copies of the fork server do not show it, an Engine does

if __name__ == "__main__":
    engine = sgl.Engine(
        model_path=sys.argv[1], device="cpu", dtype="float32", chunked_prefill_size=512, max_total_tokens=16384,
        sleep_on_idle=True, log_level="warning",
    )
    three = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
    try:
        engine.generate(input_ids=[5, 10**6], sampling_params=three)
    except ValueError as e:
        print(e)
    answers = [engine.generate(input_ids=[5, 6, 7, 8 + i], sampling_params=three) for i in range(2)]
    laps = engine.get_server_info()["internal_states"][0]["laps"]
    tokens = [len(a["output_ids"]) for a in answers]
    print("answered", tokens, laps["enabled"], laps.get("reason"), laps["decode"]["steps"])
    engine.shutdown()
"""


def test_engine_prefills_and_decodes_with_laps(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"  # a file, because the engine starts its processes from its main module
    script.write_text(ENGINE)
    knobs = {"SGLANG_LAPS_SCHEDULER": '{"tbt_ms": 100}', "SGLANG_HOST_IP": "127.0.0.1"}
    done = warm.SGLANG.run(str(script), str(make_checkpoint()), timeout=300, env=knobs)
    assert "input_ids: 1000000 is outside of the vocabulary" in done.stdout, (done.stdout, done.stderr[-3000:])
    assert "answered [3, 3] True None 4" in done.stdout, (done.stdout, done.stderr[-3000:])
    assert "LAPS scheduler is off" not in done.stdout + done.stderr
