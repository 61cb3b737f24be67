"""``sgl.Engine`` with the environment variable set: where LAPS has nothing to do it is not in the way."""

from __future__ import annotations

from pathlib import Path

import warm
from served import checkpoint

ENGINE = """
import sys
import sglang as sgl

if __name__ == "__main__":
    engine = sgl.Engine(
        model_path=sys.argv[1], device="cpu", dtype="float32", chunked_prefill_size=512, max_total_tokens=16384,
        sleep_on_idle=True, log_level="warning",
    )
    answers = [engine.generate(input_ids=[5, 6, 7, 8 + i], sampling_params={"max_new_tokens": 3}) for i in range(2)]
    laps = engine.get_server_info()["internal_states"][0]["laps"]
    print("answered", [len(a["output_ids"]) for a in answers], laps["enabled"], laps["reason"], laps.get("graphs"))
    engine.shutdown()
"""


def test_an_engine_that_is_no_prefill_server_runs_as_stock(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"  # a file: the engine starts its processes from its main module
    script.write_text(ENGINE)
    knobs = {"SGLANG_LAPS_SCHEDULER": '{"graphs": true}', "SGLANG_HOST_IP": "127.0.0.1"}
    done = warm.SGLANG.run(str(script), str(checkpoint()), timeout=300, env=knobs)
    assert "answered [3, 3] False --disaggregation-mode is null, not prefill None" in done.stdout, done.stderr[-3000:]
    assert "LAPS scheduler is off" in done.stdout + done.stderr
    assert "LAPS graphs" not in done.stdout + done.stderr
