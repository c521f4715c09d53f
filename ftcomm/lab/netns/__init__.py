"""Hosts in network namespaces on one machine: the network that `ftcomm run --hosts netns`, tests and benches use."""
