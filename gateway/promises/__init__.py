"""The TBT promises of all engines to their decodes, which one gateway decides."""
