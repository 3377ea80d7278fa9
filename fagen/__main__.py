"""`python -m fagen`: the command line."""

import sys

from fagen.cli import main

sys.exit(main())
