"""What a figure is measured against: floors of hardware, shapes of models, tables."""
