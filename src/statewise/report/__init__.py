"""Reports: plain data from run directories, and one HTML file from plain data."""
