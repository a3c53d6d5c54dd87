"""From what a caller asks for to a model that is ready: its description, its plan, and the engine that runs it."""
