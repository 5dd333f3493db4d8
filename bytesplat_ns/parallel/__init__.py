"""Many ranks, one model: who owns which Gaussians and views, and what the ranks tell each other."""
