"""The command ``python -m benchmark.serve``."""

import sys

from benchmark.serve.command import main

sys.exit(main())
