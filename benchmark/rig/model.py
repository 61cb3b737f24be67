"""A small Qwen2 checkpoint with tokenizer and chat template, generated locally: no model hub is needed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = (3, 2000)
"""Token ids of prompts: those of the small model, without its special tokens."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the checkpoint. The default prefills some tens of thousands of tokens per second on two cores."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 352
    vocab: int = 2048
    context: int = 32768
    seed: int = 7
    embedding: float = 1.0
    """Factor of the embeddings. With a large factor, the next token depends most on the last: a draft can be right."""


SLICED = Shape(hidden=32, layers=8, heads=2, kv_heads=1, intermediate=2560)
"""Shape that spends most of a step in GEMMs, like a 7B model, and has layers between which a step can be paused. A
chunk of 1,024 tokens takes over 100 ms on one core, seven times as long as 64 tokens. With a 7B model on an H200, a
chunk of 2,048 takes seven times as long as 64 tokens, and one of 8,192 33 times. Attention is small, because SGLang's
CPU attention computes each chunk over its whole prefix."""


EMULATED = Shape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=32, context=131072)
"""Shape for emulated devices: minimal work, because its time must fit into the emulated step."""

SHAPES = {
    "tiny": Shape(256, 3, 4, 2, 256, 512),
    "0.5B": Shape(896, 24, 14, 2, 4864, 151936),
    "7B": Shape(3584, 28, 28, 4, 18944, 152064),
    "8B": Shape(4096, 36, 32, 8, 12288, 151936),
}
"""Sizes of Qwen2.5 and Qwen3-8B, and of a model small enough for a CPU."""


def write_shape(name: str, folder: Path, *, context: int = 32768) -> Path:
    """Write a model folder with a config and no weights, for ``--load-format dummy``; return it."""
    _config(replace(SHAPES[name], context=context), tied=name == "0.5B", begin=1, end=2).save_pretrained(folder)
    return folder


@cache
def corpus() -> list[str]:
    """Return the repository's own text, on which the tokenizer is trained."""
    files = [REPO / "LICENSE", REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
    files += sorted((REPO / "python").rglob("*.py"))
    return [f.read_text() for f in files if f.exists()]


def key(contents: object) -> str:
    """Return ten characters that change with these contents (JSON-ready), and with the text of the tokenizer."""
    return hashlib.sha256(json.dumps([contents, corpus()], sort_keys=True).encode()).hexdigest()[:10]


def once(out: Path, write: Callable[[Path], None]) -> Path:
    """Fill the folder ``out`` with ``write`` unless this was done before; return the folder."""
    if (out / "done").exists():
        return out
    tmp = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    write(tmp)
    (tmp / "done").touch()
    shutil.rmtree(out, ignore_errors=True)
    tmp.rename(out)
    return out


def make(folder: Path, shape: Shape | None = None) -> Path:
    """Write the checkpoint under ``folder`` unless it exists; return its path.

    Weights are float32, seeded, saved as safetensors; the same seed gives the same bytes.
    """
    shape = shape or Shape()

    def write(tmp: Path) -> None:
        save_tokenizer(tmp, shape)
        _save_weights(tmp, shape)

    return once(folder / f"qwen2-{shape.layers}x{shape.hidden}-{key(asdict(shape))}", write)


def save_tokenizer(folder: Path, shape: Shape, special: Sequence[str] = SPECIAL) -> None:
    """Write a tokenizer with chat template, trained on the repository's own text. `special`: its first tokens."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(corpus(), vocab_size=shape.vocab, special_tokens=list(special), show_progress=False)
    bpe.save(str(folder / "bpe.json"))
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "bpe.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(special),
        chat_template=CHAT_TEMPLATE,
        model_max_length=shape.context,
    ).save_pretrained(folder)
    (folder / "bpe.json").unlink()


def _save_weights(folder: Path, shape: Shape) -> None:
    import torch
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(shape.seed)
    ends = (SPECIAL.index(name) for name in ("<|endoftext|>", "<|im_end|>"))
    config = _config(shape, False, *ends)
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.float32)
    # Sharp attention, so that a wrong key or position changes the output.
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.mul_(3.0 if "embed" not in name else shape.embedding)
    model.save_pretrained(folder, safe_serialization=True)


def _config(shape: Shape, tied: bool, begin: int, end: int) -> Any:
    from transformers import Qwen2Config

    config = Qwen2Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.context,
        tie_word_embeddings=tied,
        bos_token_id=begin,
        eos_token_id=end,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    return config
