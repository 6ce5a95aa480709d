"""Results as pages: data comes in, one HTML file without any other comes out."""
