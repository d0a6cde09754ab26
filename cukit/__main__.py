"""`python -m cukit`: the same as `python cukit_cli.py`."""

import sys

import cukit_cli

sys.exit(cukit_cli.main())
