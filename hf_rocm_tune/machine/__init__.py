"""The machine, read without torch, and child processes with a deadline.

``sysfs`` reads files, of the live machine or of a recording; ``gpus`` the kernel's files of GPUs; ``survey`` returns
one record of everything. ``process`` chooses the visible cards and ``variables`` decides on environment variables, both
before torch is imported. ``software`` queries torch in a process of its own (``child``).
"""
