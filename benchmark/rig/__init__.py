"""Test rig: a small model, real servers on loopback, and the devices that they run on."""

# ruff: noqa: F401
from benchmark.rig.devices import CPU, CUDA, DEVICES, EMULATED, H200, MODELS, Device, add_device, has_cuda, with_path
from benchmark.rig.fleet import Fleet, busy_s, flush, get_json, warm_up
from benchmark.rig.model import REPO
from benchmark.rig.progress import Progress
from benchmark.rig.servers import ServerError
from benchmark.rig.variants import BUILT_IN, FCFS, GRAPHS, LAPS, ON, SMALL, SPF, STOCK, Variant
