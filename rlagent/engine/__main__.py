"""`python -m rlagent.engine`."""

import sys

from rlagent.engine.main import main

if __name__ == "__main__":
    sys.exit(main())
