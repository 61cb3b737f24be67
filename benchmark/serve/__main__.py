"""The command ``python -m benchmark.serve``."""

import sys

from benchmark.serve.command import COMMAND

sys.exit(COMMAND.main())
