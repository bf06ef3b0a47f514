"""The comparison of several contexts with one device."""
