"""Files that TensorBoard reads: scalars, histograms, images and graphs."""
