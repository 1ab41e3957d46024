# SPDX-License-Identifier: Apache-2.0
"""The one exception that is meant for the user."""


class FastpromptError(ValueError):
    """Bad input or a bad environment: one sentence that names the cause and the cure.

    The command line prints it without a traceback and exits with status 2.
    """
