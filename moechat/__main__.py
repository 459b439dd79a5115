"""``python -m moechat``."""

import sys

from moechat.cli.app import main

sys.exit(main())
