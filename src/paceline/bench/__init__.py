"""Measuring: plain against accelerated decoding, compared and tested."""
