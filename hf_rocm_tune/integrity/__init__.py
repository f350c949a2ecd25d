"""Files that appear whole or not at all, manifests over them, and canaries in device memory."""
