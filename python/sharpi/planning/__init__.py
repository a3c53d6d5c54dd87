"""Plans: where each tensor goes, and how fast a model will be there."""
