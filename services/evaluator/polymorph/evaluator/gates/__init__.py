"""The gates, from cheap to dear. Each takes a subject and gives an outcome; none shares a process with a candidate."""
