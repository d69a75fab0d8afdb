"""How fast HeadCNI is, as ratios to a peer that runs beside it, on this machine, in this run.

make bench                    everything
make bench ONLY="cni ipam"    parts of it
"""
