# SPDX-License-Identifier: Apache-2.0
"""Entry point for the launchers: ``deepspeed train.py …``, ``torchrun train.py …`` or ``python train.py …``.

The same program as ``fastprompt train``; ``python train.py --help`` lists the flags.
"""

import sys

from fastprompt.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
