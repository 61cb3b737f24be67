"""``python -m laps_plan.plan`` is ``laps-plan``."""

from __future__ import annotations

import sys

from laps_plan.plan.command import main

sys.exit(main())
