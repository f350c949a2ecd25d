"""End-to-end tests through the real command line."""
