"""Benchmarks for the user's own machine: ``hf-rocm-tune bench transfer|load|step|comm|sft``.

The sides of a comparison are timed in turns, in one process or in alternating processes, so that other load on the
machine affects them alike. Nothing here passes or fails by time.
"""
