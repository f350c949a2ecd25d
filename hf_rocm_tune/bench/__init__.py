"""Benchmarks that a user runs on their own machine: ``hf-rocm-tune bench transfer|load|step|comm``.

Both sides of a comparison are timed in turns, in one process or in processes that alternate, so that whatever else the
machine does falls on both. Nothing here passes or fails by time.
"""
