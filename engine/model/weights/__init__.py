"""The weights of a model: their placement in memory, and how a checkpoint fills them."""
