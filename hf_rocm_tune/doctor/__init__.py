"""Checks of the machine, and the drill, which injects faults into transfers.

Reading order: `findings` (input and output of a check), one file for each family of checks (`system software` read,
`links` reads and measures, `transfers arithmetic pairs` measure), `diagnose` (runs them, measurements in child
processes), `command` (the forms of the report, and captures).
"""
