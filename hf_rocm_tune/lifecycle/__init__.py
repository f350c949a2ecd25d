"""What starts a job, keeps it alive, and says how it ended.

`launch` starts its processes (`launcher_flags`: which flags are the launcher's); `exits` gives every end a line and a
code; `supervisor` restarts it from its newest checkpoint, told by `heartbeat`; `watchdog` and `stall` end a run that
hangs. Without torch, but for `stall`.
"""
