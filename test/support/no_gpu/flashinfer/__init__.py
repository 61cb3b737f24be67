"""In the place of FlashInfer, which SGLang imports wherever it is installed and uses on NVIDIA GPUs."""

raise ImportError("not used without a GPU")
