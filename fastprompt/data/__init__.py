# SPDX-License-Identifier: Apache-2.0
"""From a text file to packed training batches."""
