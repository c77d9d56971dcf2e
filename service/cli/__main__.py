"""Runs `python -m service.cli`, the command where it is not installed."""

from __future__ import annotations

import sys

from service.cli import main

sys.exit(main())
