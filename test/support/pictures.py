"""Small seeded vision-language models, prompts with pictures, and the answers of transformers to these prompts."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ties import TIE

from benchmark.rig import checkpoints, model

SPECIAL = (
    *(*model.SPECIAL, "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
"""Placeholder of a picture in a prompt."""
SIDES = (56, 504)
"""Shortest and longest side of a picture (pixels); a token covers a square with sides of 28 or 32 pixels."""
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
VISION: dict[str, dict[str, Any]] = {
    "Qwen2_5_VL": {"depth": 4, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1, 3]},
    "Qwen3VL": {"depth": 4, "patch_size": 16, "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 2, 3]},
    "Qwen3_5": {"depth": 4, "patch_size": 16, "num_position_embeddings": 256},
}
"""Encoder settings by family; the family is a prefix of transformers' class names. Qwen3VL also adds outputs of some
encoder layers to decoder layers (deepstack)."""
TEXT: dict[str, dict[str, Any]] = {
    "Qwen2_5_VL": {"rope_parameters": MROPE},
    "Qwen3VL": {"rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 16},
    "Qwen3_5": {
        "rope_parameters": {**MROPE, "mrope_interleaved": True, "partial_rotary_factor": 0.5},
        **{"partial_rotary_factor": 0.5, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    },
}
WRITTEN: dict[str, dict[str, Any]] = {
    "Qwen3_5": {"text_config": {"full_attention_interval": 4}, "vision_config": {"deepstack_visual_indexes": []}}
}
"""Fields of config.json that SGLang reads but transformers does not write."""
NAMES = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}
"""Model families by checkpoint name."""


def make(folder: Path, name: str) -> Path:
    """Write the checkpoint of this name under ``folder`` unless it exists; return its path."""
    family, common = NAMES[name], [dict(checkpoints.SIZES), checkpoints.VERSION, checkpoints.SEED, SIDES]
    key = model.key([VISION[family], TEXT[family], WRITTEN.get(family), *common])
    return model.once(folder / f"{name}-{key}", lambda tmp: _write(tmp, family))


def _write(folder: Path, family: str) -> None:
    import torch
    import transformers

    shape = model.Shape(context=checkpoints.SIZES["max_position_embeddings"])
    model.save_tokenizer(folder, shape, SPECIAL)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(checkpoints.SEED)
    text = {k: v for k, v in checkpoints.SIZES.items() if k != "pad_token_id"} | TEXT[family]
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": text["hidden_size"]}
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {f"vision_{end}_token_id": f"vision_{end}" for end in ("start", "end")}
    config = getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config={**vision, **VISION[family]},
        tie_word_embeddings=False,
        **{field: SPECIAL.index(f"<|{token}|>") for field, token in names.items()},
    )
    made = getattr(transformers, f"{family}ForConditionalGeneration")(config).to(torch.float32)
    with torch.no_grad():
        for weight, values in made.state_dict().items():
            checkpoints.randomize(weight, values)
    made.save_pretrained(folder, safe_serialization=True)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    for part, fields in WRITTEN.get(family, {}).items():
        written[part] |= fields
    path.write_text(json.dumps(written, indent=1))
    pixels = {"shortest_edge": SIDES[0] ** 2, "longest_edge": SIDES[1] ** 2}
    seen = transformers.Qwen2VLImageProcessor(patch_size=VISION[family]["patch_size"], merge_size=2, size=pixels)
    processor, frames = (
        (transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor)
        if family == "Qwen2_5_VL"
        else (transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor)
    )
    processor(image_processor=seen, tokenizer=tokenizer, video_processor=frames()).save_pretrained(folder)


def make_picture(seed: int) -> str:
    """Return a picture of random size and noise, as a data URL."""
    import numpy as np
    from PIL import Image

    rng, out = np.random.default_rng(seed), io.BytesIO()
    height, width = rng.integers(*SIDES, 2)
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def make_prompt(rng: random.Random, words: Sequence[str], *, long: bool) -> tuple[str, tuple[str, ...]]:
    """Return a prompt and its pictures: 3 to 5 if ``long``, else at most 1. Half of the pictures repeat often."""
    count = rng.randrange(3, 6) if long else rng.randrange(2)
    seeds = [rng.choice((rng.randrange(6), rng.randrange(10**6))) for _ in range(count)]
    pages = [f"{' '.join(rng.choices(words, k=rng.randrange(9)))}{PLACE}" for _ in seeds]
    return "".join(pages) + " ".join(rng.choices(words, k=rng.randrange(3, 30))), tuple(map(make_picture, seeds))


class Answers:
    """Greedy answers of a checkpoint under transformers."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self._model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor: Any = AutoProcessor.from_pretrained(folder)

    def greedy(self, text: str, pictures: Sequence[str], tokens: int) -> list[int]:
        """Return the next ids after a prompt: ``tokens`` ids, or fewer, up to the first tie.

        At a tie (see ``TIE``) both tokens are right, and every later token depends on the choice.
        """
        from PIL import Image
        from transformers import GenerationConfig

        seen = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in pictures]
        given = self.processor(text=[text], images=seen or None, return_tensors="pt")
        whole = {"output_logits": True, "return_dict_in_generate": True}
        ends = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=-1, **whole)
        said = self._model.generate(**given, generation_config=ends)
        best = [logits[0].topk(2) for logits in said.logits]
        clear = itertools.takewhile(lambda two: two.values[0] - two.values[1] > TIE, best)
        return [int(two.indices[0]) for two in clear]
