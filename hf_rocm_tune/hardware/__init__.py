"""What machine this is: the card table and readers of the kernel's files, on a root that tests can replace.

``sysfs_tree`` is the one door to the machine's files: live, a directory or a recording. ``sysfs`` reads a file, ``kfd``
the topology of AMD GPUs, ``*_sysfs`` the rest; ``survey`` puts it all into one ``machine`` record. ``cards`` knows the
cards, ``visible`` chooses which of them this process is to see. None of these imports torch, because the choice has to
be made before torch is. ``software`` asks torch, in a process of its own, and ``joined`` tells which of its devices is
which card.
"""
