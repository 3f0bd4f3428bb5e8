"""What Tidewheel looks like in use: a sample application, and the demonstration that puts it to work."""
