"""What HeadCNI does to the kernel: links, addresses, routes, qdiscs and one nft table."""
