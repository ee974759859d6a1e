"""The loop: requests, scheduling, stops, statistics, the step."""
