"""What is done with a finished adapter: push to the Hub, model card, plots and report, merge, generate."""
