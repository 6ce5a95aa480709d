"""flatmin in other people's training loops: a file each, imported by name, so that flatmin itself needs torch alone."""
