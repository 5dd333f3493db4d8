"""A demo that needs no data: photographs a ray-traced scene, trains on it, and shows the result."""
