"""Graph backends of the cells: SGLang's full CUDA graphs, or an emulation where a device has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from sglang.srt.platforms import current_platform


class EmulatedGraphBackend(FullCudaGraphBackend):  # type: ignore[misc]
    """Records each body with its static buffers, and "replays" it by running it on those same buffers again.

    As with captured graphs, all outputs live in one buffer that the next replay overwrites.
    """

    def __init__(self, cuda_graph_runner: Any, **kwargs: Any) -> None:
        super().__init__(cuda_graph_runner, **kwargs)
        self._bodies: dict[Any, Callable[[], Any]] = {}
        self._out: torch.Tensor | None = None

    @contextmanager
    def capture_session(self, stream: Any = None) -> Iterator[None]:
        yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any | None = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        self._place(forward_fn())
        if post_warmup_hook is not None:
            post_warmup_hook()
        self._bodies[shape_key] = forward_fn

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._bodies

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        return self._place(self._bodies[shape_key]())

    def drop(self, shape_key: Any) -> None:
        """Forget one body."""
        del self._bodies[shape_key]

    def cleanup(self) -> None:
        self._bodies.clear()
        self._out = None

    def _place(self, out: Any) -> Any:
        if not torch.is_tensor(out):
            return out
        if self._out is None or self._out.shape[0] < out.shape[0]:
            self._out = torch.empty_like(out)
        place = self._out[: out.shape[0]]
        place.copy_(out)
        return place


def emulation() -> type[EmulatedGraphBackend] | None:
    """The emulating backend, if the platform offers one."""
    if not current_platform.is_out_of_tree():
        return None
    offered = current_platform.get_full_graph_backend_cls()
    return offered if isinstance(offered, type) and issubclass(offered, EmulatedGraphBackend) else None


def drop(backend: FullCudaGraphBackend, shape_key: Any) -> None:
    """Free one captured graph; its memory returns to the shared pool."""
    if isinstance(backend, EmulatedGraphBackend):
        backend.drop(shape_key)
        return
    backend._graphs.pop(shape_key).reset()
    backend._outputs.pop(shape_key, None)
