"""Benchmarks that a user runs on their own machine: ``hf-rocm-tune bench transfer|load|step``.

Reading order: `command` (the flags), then for transfers `ways` and `transfers`; for loading `checkpoint`, `pagecache`,
`memory`, `load_spec`, `load_child` and `loads`; for training `steps`. `figures`, `machine`, `result` and `plots` are
shared.

Both sides of a comparison are timed in turns, in one process or in processes that alternate, so that whatever else the
machine does falls on both. Nothing here passes or fails by time.
"""
