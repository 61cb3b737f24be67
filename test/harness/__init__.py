"""Tests start real servers with ``benchmark.rig``: model.make, servers.prefill/decode/minilb, servers.running."""
