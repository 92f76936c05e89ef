"""The references that figures are compared with: hardware floors, model shapes, result tables."""
