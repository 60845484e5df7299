"""Native CPU operations (C++), built once on first use."""
