"""Real towers: how Hugging Face vision models are driven. No tower code is copied."""
