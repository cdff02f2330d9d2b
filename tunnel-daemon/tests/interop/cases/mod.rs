//! Test cases, grouped by the part under test.

mod agents;
mod connect;
mod end_to_end;
mod failover;
mod goaway;
mod hostile_agents;
mod hostile_clients;
mod isolation;
mod lag;
mod node_side;
mod peers;
mod proxy_clients;
mod shutdown;
mod skew;
mod stub_server;
mod upstream_suite;
