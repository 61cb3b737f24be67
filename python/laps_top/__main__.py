"""``python -m laps_top``."""

from laps_top.command import main

raise SystemExit(main())
