"""Training with several processes: preflight, checked gradient averages, FSDP2, tensor parallelism, watchdog."""
