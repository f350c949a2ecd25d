"""What machine this is: the card table and readers of the kernel's files, on a root that tests can replace.

``sysfs`` reads one file, ``kfd`` the topology of AMD GPUs, ``cards`` knows the cards, ``visible`` chooses which
of them this process is to see. None of them imports torch, because the choice has to be made before torch is.
"""
