"""What ranks of different hosts exchange, behind keys: each rank has a gateway, and everything passes through it.

torch's store and gloo trust everybody who can reach their ports. With keys, both listen on the loopback interface only.
A process beside each rank, its gateway, has the only port that other hosts can reach. It speaks TLS 1.3 in which both
sides prove that they have the job's keys, and reads nothing from those who do not.

gloo needs no help to find its peers. Every rank has a loopback address of its own, gloo publishes that address in the
store, and a store of ours replaces the addresses of other hosts' ranks by addresses at which this rank's gateway
listens.
"""
