//! The tests, by what they look at.

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
mod numbers;
mod plaintext_lanes;
mod processes;
mod sockets;
mod tunnels;
