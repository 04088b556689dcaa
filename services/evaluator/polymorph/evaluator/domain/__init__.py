"""What the gates decide, without processes, buses or clocks."""
