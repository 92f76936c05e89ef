"""What engines promise their decodes, decided for all of them by one gateway."""
