"""Is this machine fit to train, and if not, how is it fixed? And the drill, which shows that detection works.

Reading order: `findings` (what a check is given and says), one file a family of checks (`system software` read, `links`
reads and measures, `transfers arithmetic layers` measure), `diagnose` (which runs them, measurements in children),
`command` (the forms of the report, and machines taken elsewhere).
"""
