# SPDX-License-Identifier: Apache-2.0
"""``python -m fastprompt``: the same as the ``fastprompt`` command."""

import sys

from fastprompt.cli import main

sys.exit(main())
