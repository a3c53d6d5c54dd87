"""What the tests of the Hub share."""

from hub_world import large, split, story, world  # noqa: F401  (fixtures)
