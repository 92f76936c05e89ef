"""What decoding beside the plain step costs and gains: drafts, beams, adapters."""
