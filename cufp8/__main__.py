"""`python -m cufp8 ...` is `cufp8 ...`."""

import sys

from cufp8.cli import main

sys.exit(main())
