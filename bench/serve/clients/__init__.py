"""Who sends a mix of requests, when and to what, and notes what comes back."""
