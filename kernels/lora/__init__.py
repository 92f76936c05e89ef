"""LoRA: adds a step's adapters to the products with the model's weights."""
