"""Other libraries, each as its own documentation says it is fastest. They run in a process of their own.

A module here imports nothing but the standard library, ``benchmarks.harness`` and its own library, so that it also
runs in an environment that holds only that library.
"""
