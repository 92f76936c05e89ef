"""How a pool's memory reaches pullers of its host."""
