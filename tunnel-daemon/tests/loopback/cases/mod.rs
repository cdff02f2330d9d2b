//! The tests, by what they look at.

mod admin;
mod agents;
mod descriptors;
mod files;
mod forward_proxy;
mod grants;
mod hostile_agents;
mod hostile_clients;
mod hostile_lanes;
mod hostile_servers;
mod isolation;
mod lane_faults;
mod lane_processes;
mod lanes;
mod least_privilege;
mod metrics;
mod node_namespaces;
mod node_processes;
mod node_refusals;
mod node_servers;
mod node_tunnels;
mod numbers;
mod plaintext_lanes;
mod processes;
mod sockets;
mod tunnels;
