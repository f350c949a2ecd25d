"""Several ranks: agreeing on decisions."""
