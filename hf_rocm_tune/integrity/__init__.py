"""What was right stays right: sentinels over frozen weights, replicas, and manifests over files."""
