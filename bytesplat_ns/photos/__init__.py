"""Photos and their cameras: from files of any kind to pinhole images in memory."""
