"""What a user runs to see for themselves: the drill, which puts faults into real transfers and counts what is found."""
