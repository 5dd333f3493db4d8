"""Gaussians outside of training: where they come from, files they are kept in, frames they are in."""
