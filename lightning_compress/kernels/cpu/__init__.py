"""Compiled CPU kernels (numba): one call codes all blocks of a table, the GIL released, every block read and written once.

Compiled code is cached on disk. No ``parallel=True``: numba's thread pools do not survive a fork.
"""
