"""What every front does with a call, and whether it may wait."""
