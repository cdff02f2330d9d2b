//! The tests, by what they look at.

mod agents;
mod files;
mod grants;
mod hostile_agents;
mod hostile_clients;
mod isolation;
mod metrics;
mod processes;
mod sockets;
mod tunnels;
