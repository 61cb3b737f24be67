"""Requests that end a stock server, one alone."""

from __future__ import annotations

from typing import Any

LOGPROBS = {"return_logprob": True}
FATAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "negative id": ({"input_ids": [5, -1]}, {}),
    "id outside": ({"input_ids": [10**9, 5]}, {}),
    "id outside, batch": ({"input_ids": [[5], [10**9]]}, {}),
    "rows": ({"input_ids": None, "input_embeds": [[0.1] * 3] * 4}, {}),
    "room": ({"bootstrap_room": -5}, {}),
    "rooms": ({"bootstrap_room": [7]}, {}),
    "states of many": ({"return_hidden_states": [False]}, {}),
    "adapters of many": ({"lora_id": ["a"]}, {}),
    "labels": ({"custom_labels": {"a": "b"}}, {}),
    "session": ({"session_params": {"id": ["a"]}}, {}),
    "id beside a picture": ({"input_ids": [10**9, 5], "image_data": "x"}, {}),
    "no text beside a picture": ({"input_ids": None, "text": "", "image_data": "x"}, {}),
    "overrides": ({"positional_embed_overrides": [[1]]}, {}),
    "logprobs": ({**LOGPROBS, "top_logprobs_num": 10**6}, {}),
    "start": ({**LOGPROBS, "logprob_start_len": -5}, {}),
    "positions": ({**LOGPROBS, "token_ids_logprob": [7], "token_indices_to_pool": [100]}, {"max_new_tokens": 0}),
    "bias": ({}, {"logit_bias": {"5": 1e39}, "temperature": 1.0}),
    "top_k": ({}, {"top_k": 10**12}),
    "stop ids": ({}, {"stop_token_ids": [10**9], "min_new_tokens": 1}),
    "processor": ({"custom_logit_processor": "of no class"}, {}),
}
"""Fields of the body and sampling parameters with which one request ends a stock server."""
