"""Runtime: images in, features out. Empty until the encoder manager arrives."""
