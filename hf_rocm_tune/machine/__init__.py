"""What machine this is, read without torch, and the processes on it.

``sysfs`` reads files, of the live machine or of a recording; ``gpus`` and ``host`` read what the kernel tells,
``survey`` puts it all into one record, ``cards`` knows the cards. ``visible`` chooses which of them this process sees
and ``variables`` decides on environment variables: both before torch is imported. ``software`` asks torch, in a process
of its own (``child``); ``process`` is what a training process settles at its start.
"""
