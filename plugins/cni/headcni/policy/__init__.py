"""Network policies: from objects to sets, verdict maps and chains of nftables, and explanations."""
