"""What every compressor means, in plain torch: blocks are the rows of a matrix, codes are the rows of a uint8 matrix."""
