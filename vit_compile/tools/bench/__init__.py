"""`vit-compile bench`: every way to run a vision tower, on the same requests, in one process, checked against eager."""
