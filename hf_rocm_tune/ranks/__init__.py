"""Several processes that train one model: preflight, judged averages of gradients, FSDP2's traffic, watchdog."""
